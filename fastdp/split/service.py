"""The vendor on the network: who calls, for how long, in what chunks; and every refusal with its reason.

A refusal ends one call. Nothing a customer sends reaches another's run, and an unforeseen error ends the call alone too.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastdp.split.channel import CUSTOMER, METHOD, OPTIONS, check_insecure, check_secured, grpc
from fastdp.split.operations import expecting
from fastdp.split.wire import MessageRejected, Outgoing, receive
from fastdp.tls_proxy import ProxyLimits, TlsProxy
from fastdp.validate import host_and_port

#: How long calls may go on once the service is closed.
_GRACE_SECONDS = 5.0

log = logging.getLogger(__name__)


class Service:
    """A `SplitVendor` that answers at an address; a context manager. See `SplitVendor.serve`.

    Attributes:
        address: host and port, with the port that was taken.
        calls: how many calls of each customer are being answered.
    """

    def __init__(
        self, vendor: Any, address: str, certificates: Path | None, insecure: bool, allowed: frozenset[str] | None
    ):
        check_secured(certificates, insecure)
        host, port = host_and_port(address)
        if insecure:
            check_insecure(address)
        self.vendor, self.allowed, self.insecure = vendor, allowed, insecure
        self._expect = expecting(vendor.forms)
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()
        # A place for every call that is let in: `_take_place` turns away what is more.
        threads = vendor.limits.calls * vendor.limits.max_customers
        # The one method, whose requests and replies are chunks as they are.
        service, name = METHOD.strip("/").split("/")
        exchange = grpc.stream_stream_rpc_method_handler(self._exchange)
        handler = grpc.method_handlers_generic_handler(service, {name: exchange})
        self._server = grpc.server(
            ThreadPoolExecutor(threads, "fastdp-call"),
            handlers=[handler],
            options=[*OPTIONS, ("grpc.so_reuseport", 0), ("grpc.max_concurrent_streams", 2 * vendor.limits.calls)],
            maximum_concurrent_rpcs=2 * threads,
        )
        shown = f"[{host}]" if ":" in host else host
        self._proxy: TlsProxy | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        try:
            if certificates is None:
                taken = self._server.add_insecure_port(f"{shown}:{port}")
            else:
                taken = self._listen((host, port), certificates)
        except (RuntimeError, OSError) as error:
            raise OSError(f"cannot listen at {address}: {error}") from None
        self.address = f"{shown}:{taken}"
        self._server.start()

    def _listen(self, address: tuple[str, int], certificates: Path) -> int:
        """Take calls from a TLS proxy alone, by a socket that nobody else on this machine can reach."""
        self._folder = tempfile.TemporaryDirectory(prefix="fastdp-")
        backend = Path(self._folder.name) / "calls"
        self._proxy = TlsProxy(
            address, certificates, backend, protocol="h2", limits=ProxyLimits(connections=self.vendor.limits.calls)
        )
        self._server.add_insecure_port(f"unix:{backend}")
        return self._proxy.port

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the service to end; True if the time ran out first."""
        return self._server.wait_for_termination(seconds)

    def close(self) -> None:
        """Take no more calls, let those that run end within seconds, and keep every run."""
        self._server.stop(_GRACE_SECONDS).wait()
        if self._proxy is not None and self._folder is not None:
            self._proxy.close()
            self._folder.cleanup()
        self.vendor.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            reply = self._answer(chunks, context)
        except MessageRejected as refusal:
            log.info("refused: %s", str(refusal))
            context.abort(getattr(grpc.StatusCode, refusal.code), str(refusal))
        except grpc.RpcError:
            # The customer went away in the middle of its message.
            return
        except Exception:
            log.exception("a call failed")
            context.abort(grpc.StatusCode.INTERNAL, "the vendor failed to answer; its own log says more")
        yield from reply

    def _answer(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> Outgoing:
        remaining, most = context.time_remaining(), self.vendor.limits.deadline
        if remaining is None or remaining > most:
            raise MessageRejected(f"a call must have a deadline, of at most {most:g} seconds")
        name = self._name(context)
        self._take_place(name, context)
        message = receive(chunks, self._expect, self.vendor.limits.max_message_bytes)
        return self.vendor.answer(name, message, context.time_remaining())

    def _name(self, context: grpc.ServicerContext) -> str:
        """Who calls. Raises MessageRejected for a customer that is not let in."""
        if self.insecure:
            given: dict[str, Any] = dict(context.invocation_metadata())
            name = str(given.get(CUSTOMER, "customer"))
        else:
            assert self._proxy is not None
            # The handshake has checked it, but a connection may outlive its certificate.
            try:
                name = self._proxy.name(context.peer().removeprefix("unix:"))
            except ValueError as error:
                raise MessageRejected(str(error), "UNAUTHENTICATED") from None
        if self.allowed is not None and name not in self.allowed:
            raise MessageRejected(f"{ascii(name)[:70]} is not a customer here", "PERMISSION_DENIED")
        return name

    def _take_place(self, name: str, context: grpc.ServicerContext) -> None:
        """Take one of the calls that a customer may make at once, until its reply is sent or its deadline passes.

        Raises MessageRejected if the customer has no place left, or as many customers as are served are calling.
        """
        limits = self.vendor.limits
        with self._lock:
            if self.calls[name] >= limits.calls:
                raise MessageRejected(
                    f"{limits.calls} calls of yours are being answered: come back later", "UNAVAILABLE"
                )
            if name not in self.calls and len(self.calls) >= limits.max_customers:
                raise MessageRejected(f"{limits.max_customers} customers are calling: come back later", "UNAVAILABLE")
            self.calls[name] += 1
        if not context.add_callback(lambda: self._leave_place(name)):
            # The call ended meanwhile.
            self._leave_place(name)

    def _leave_place(self, name: str) -> None:
        with self._lock:
            self.calls[name] -= 1
            if not self.calls[name]:
                del self.calls[name]
