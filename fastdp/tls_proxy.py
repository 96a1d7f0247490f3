"""A TLS listener that lets in holders of a certificate, and a proxy that passes their bytes to a program's socket.

A stranger can hold nothing but a place for a handshake, for a few seconds, and a newcomer takes the oldest one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import math
import os
import resource
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastdp.tls import Revocations, certificate_name, check_certificate, server_context
from fastdp.untrusted import escape_controls

RELAY_BYTES = 1 << 16
_BACKLOG = 1024
_MANY_DESCRIPTORS = 1 << 16

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProxyLimits:
    """What a `TlsListener` takes from those who connect.

    Attributes:
        handshake_seconds: longest a handshake may last.
        handshakes: most handshakes at once; an eighth of this process's descriptors if that is fewer.
        connections: most connections of one certificate; a newer one ends its oldest.
        stall_seconds: longest that either end may leave bytes unread.
        check_seconds: time between two looks at whether the certificates of open connections still hold.
    """

    handshake_seconds: float = 5.0
    handshakes: int = 128
    connections: int = 8
    stall_seconds: float = 30.0
    check_seconds: float = 5.0


#: Serves one open connection; gets the certificate (DER) of who is at its other end.
ConnectionHandler = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class TlsListener:
    """A TLS 1.3 listener that lets in holders of a certificate of its authority; a context manager.

    It runs in a thread of its own.

    Args:
        address: host and port to listen at; port 0 takes a free one.
        certificates: the server's own folder of `make_certificates`.
        handler: serves a connection, until it returns.
        protocol: that it speaks, as TLS names it: ``h2`` or ``http/1.1``.
        limits: see `ProxyLimits`.

    Attributes:
        port: that is listened at.

    Raises:
        ValueError: for certificates that cannot be used.
        OSError: for an address that is taken.
    """

    def __init__(
        self,
        address: tuple[str, int],
        certificates: Path,
        handler: ConnectionHandler,
        protocol: str,
        limits: ProxyLimits | None = None,
    ):
        self._context = server_context(certificates)
        self._context.set_alpn_protocols([protocol])
        self._revoked = Revocations(certificates)
        self._handler, self._limits = handler, limits or ProxyLimits()
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if descriptors == resource.RLIM_INFINITY:
            descriptors = _MANY_DESCRIPTORS
        self._handshakes = min(self._limits.handshakes, descriptors // 8)
        # A connection takes up to three descriptors: the peer's, and both ends of a local one. A quarter is left for others.
        self._most = max(1, descriptors // 5)
        self._logged = -math.inf
        self._listener = _listen(address)
        self.port = int(self._listener.getsockname()[1])
        self._waiting: dict[asyncio.Task[None], None] = {}
        self._open: dict[asyncio.Task[None], tuple[str, bytes]] = {}
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="fastdp-tls", daemon=True)
        self._thread.start()

    def check(self, certificate: bytes) -> str:
        """The name of a certificate that holds now. Raises ValueError for another."""
        check_certificate(certificate)
        self._revoked.check(certificate)
        return certificate_name(certificate)

    def log_refusal(self, what: str, peer: str, reason: object) -> None:
        """Log what was refused and why, at most once a second: a stranger could fill a disk."""
        if time.monotonic() - self._logged > 1:
            self._logged = time.monotonic()
            said = str(reason)[:160] or type(reason).__name__
            log.warning("%s of %s was refused: %s", what, peer, escape_controls(said))

    def close(self) -> None:
        """End every connection."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join()

    def __enter__(self) -> TlsListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._listener.close()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    async def _serve(self) -> None:
        checks = self._loop.create_task(self._check_again())
        reserve = os.open(os.devnull, os.O_RDONLY)
        try:
            while True:
                try:
                    accepted, peer = await self._loop.sock_accept(self._listener)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE) and not self._end_oldest(self._waiting):
                        # Something else holds the descriptors: turn one caller away, so that the queue moves on.
                        os.close(reserve)
                        with contextlib.suppress(OSError):
                            self._listener.accept()[0].close()
                        reserve = os.open(os.devnull, os.O_RDONLY)
                    await asyncio.sleep(0.01)
                    continue
                while len(self._waiting) >= self._handshakes:
                    self._end_oldest(self._waiting)
                task = self._loop.create_task(self._connection(accepted, str(peer[0])))
                task.add_done_callback(lambda _, taken=accepted: taken.close())  # type: ignore[misc]
                self._waiting[task] = None
                # An accept that finds a caller waiting does not pause: let the others move.
                await asyncio.sleep(0)
        finally:
            checks.cancel()
            os.close(reserve)

    async def _connection(self, accepted: socket.socket, peer: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            reader, writer = await self._handshake(accepted)
        except (OSError, ssl.SSLError) as error:
            self.log_refusal("a connection", peer, error)
            return
        finally:
            self._waiting.pop(task, None)
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            name = self.check(certificate)
            self._make_room(name)
            self._open[task] = name, certificate
            await self._handler(certificate, reader, writer)
            # The last bytes, such as the reason of a refusal.
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), self._limits.handshake_seconds)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
            self.log_refusal("an open connection", peer, error)
        finally:
            self._open.pop(task, None)
            # Without waiting for the peer to say that it agrees.
            writer.transport.abort()

    async def _handshake(self, accepted: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = asyncio.StreamReader(RELAY_BYTES, self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, accepted, ssl=self._context, ssl_handshake_timeout=self._limits.handshake_seconds
        )
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _check_again(self) -> None:
        while True:
            await asyncio.sleep(self._limits.check_seconds)
            for task, (name, certificate) in list(self._open.items()):
                try:
                    self.check(certificate)
                except (OSError, ValueError) as error:
                    self.log_refusal("an open connection", name, error)
                    task.cancel()

    def _make_room(self, name: str) -> None:
        """End the oldest connection of a certificate that has too many, or of the one with the most."""
        names = [other for other, _ in self._open.values()]
        if names.count(name) < self._limits.connections:
            if len(names) < self._most:
                return
            name = max(names, key=names.count)
        self._end_oldest({task: None for task, (other, _) in self._open.items() if other == name})

    def _end_oldest(self, tasks: dict[asyncio.Task[None], None]) -> bool:
        """End the first of these, if there is one."""
        oldest = next(iter(tasks), None)
        if oldest is None:
            return False
        oldest.cancel()
        tasks.pop(oldest)
        self._open.pop(oldest, None)
        return True


class TlsProxy(TlsListener):
    """A `TlsListener` in front of a program's socket, which sees plain bytes.

    Args:
        backend: the socket, in a folder that its owner alone may enter. Each connection comes to it from a socket of its
            own, by whose path `name` tells who it is.
        address, certificates, protocol, limits: see `TlsListener`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        certificates: Path,
        backend: Path,
        protocol: str,
        limits: ProxyLimits | None = None,
    ):
        self._backend = backend
        self._numbers = itertools.count()
        self._by_path: dict[str, bytes] = {}
        super().__init__(address, certificates, self._relay, protocol, limits)

    def name(self, path: str) -> str:
        """Who is at the open connection whose local socket has this path.

        Raises ValueError for a connection that did not come through here, or whose certificate no longer holds.
        """
        certificate = self._by_path.get(path)
        if certificate is None:
            raise ValueError("the connection has no certificate")
        return self.check(certificate)

    async def _relay(self, certificate: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = f"{self._backend}.{next(self._numbers)}"
        local = socket.socket(socket.AF_UNIX)
        try:
            local.setblocking(False)
            local.bind(path)
            # Known before the program can accept, and ask.
            self._by_path[path] = certificate
            await self._loop.sock_connect(local, str(self._backend))
            os.unlink(path)
            inner_reader, inner = await asyncio.open_unix_connection(sock=local, limit=RELAY_BYTES)
            try:
                ways = [self._copy(reader, inner), self._copy(inner_reader, writer)]
                tasks = [self._loop.create_task(way) for way in ways]
                try:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                inner.transport.abort()
        finally:
            self._by_path.pop(path, None)
            local.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(RELAY_BYTES):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), self._limits.stall_seconds)


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)  # type: ignore[arg-type]
    listener.setblocking(False)
    return listener
