"""Flower's Fleet API between nodes and a server, over TLS with client certificates, and none of Flower's other APIs.

Flower 1.41 serves its Fleet, Control and Runtime APIs at one port, where whoever reaches Control may run code on the server
and on every node. Here that port stays on the server's own machine. A `Gateway` beside it takes Fleet requests of holders of
a certificate, and a `NodeProxy` beside each node sends them, and lets no app in but this install's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import h11
import httpx
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fastdp.federated.bundle import check_bundle
from fastdp.tls import CA, certificate_name, client_context, server_context
from fastdp.tls_proxy import RELAY_BYTES, ProxyLimits, TlsListener
from fastdp.untrusted import quote

PREFIX = "/v1/fleet/"
ACTIVATE, GET_APP = PREFIX + "activate-node", PREFIX + "get-fab"
PUSH, PUSH_OBJECT = PREFIX + "push-messages", PREFIX + "push-object"
_OPERATIONS = (
    "deactivate-node send-node-heartbeat pull-messages push-messages get-run push-object pull-object "
    "confirm-message-received"
)
#: Everything that a node asks for. Nodes do not register themselves: their certificates do.
PATHS = frozenset([ACTIVATE, GET_APP, *(PREFIX + name for name in _OPERATIONS.split())])
REGISTER = "/v1/control/register-node"
PROTOBUF = "application/protobuf"
#: Headers that Flower adds, by their beginning.
_OWN_HEADERS = "flwr-"
_PUBLIC_KEY = "flwr-public-key"
#: Flower cuts tensors into objects of at most 20 MiB.
_LARGEST_BODY = 64 << 20
#: Most bytes of a reply's objects, which Flower keeps in memory, and of objects that it consists of.
LARGEST_REPLY, _MOST_OBJECTS = 1 << 32, 1 << 14
_IDLE_SECONDS, _REQUEST_SECONDS = 120.0, 60.0
#: Interval of interim responses (HTTP 102). Flower gives up after 30 silent seconds, and a large object can take longer.
INTERIM_SECONDS = 10.0
#: Below the gateway's limit of connections for one certificate; further requests wait.
_CONNECTIONS = ProxyLimits.connections - 2

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Request:
    """A request for one of `PATHS`."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """What is answered: a status of HTTP, and bytes of a content type."""

    status: int
    body: bytes = b""
    content_type: str = PROTOBUF

    @classmethod
    def refusal(cls, status: int, reason: str) -> Reply:
        """A status with a reason, as Flower writes one."""
        return cls(status, json.dumps({"detail": reason}).encode(), "application/json")


class Upstream:
    """A client that passes requests on to a server.

    Args:
        address: host and port.
        context: for TLS to it.
        connections: most connections at once.
    """

    def __init__(self, address: str, context: ssl.SSLContext, connections: int = 100):
        self._base = f"https://{address}"
        timeout = httpx.Timeout(_REQUEST_SECONDS, pool=None)
        pool = httpx.Limits(max_connections=connections)
        self._client = httpx.AsyncClient(verify=context, timeout=timeout, limits=pool, trust_env=False)

    async def ask(self, request: Request) -> Reply:
        """The reply, of at most 64 MiB; 503, which nodes take for "try again", if there is none."""
        headers = {name: value for name, value in request.headers.items() if name.startswith(_OWN_HEADERS)}
        headers |= {"content-type": PROTOBUF, "accept": PROTOBUF, "accept-encoding": "identity"}
        try:
            async with self._client.stream(
                "POST", self._base + request.path, content=request.body, headers=headers
            ) as found:
                body = bytearray()
                async for part in found.aiter_raw():
                    body += part
                    if len(body) > _LARGEST_BODY:
                        return Reply.refusal(502, "the reply is too large")
                return Reply(found.status_code, bytes(body), found.headers.get("content-type", PROTOBUF))
        except httpx.HTTPError as error:
            # A node's owner reads here that the certificate is for another host, or that the server closed on theirs.
            log.warning(
                "%s did not answer (%s %s): check the address, and that both ends' certificates are of one authority, valid and "
                "not revoked",
                *(self._base, type(error).__name__, quote(str(error), 160)),
            )
            return Reply.refusal(503, "the server did not answer")


class Gateway(TlsListener):
    """The server's end: serves Flower's Fleet API to holders of a certificate, at an address that nodes reach; a context manager.

    A node signs with the key of its certificate, so that one certificate is one node. The gateway registers it with Flower.

    Args:
        address: host and port to listen at.
        certificates: the server's own folder of `make_certificates`.
        superlink: host and port of Flower's SuperLink, which must be on this machine.
    """

    def __init__(self, address: tuple[str, int], certificates: Path, superlink: str):
        # Flower shows the server's own certificate, without asking for one.
        self._upstream = Upstream(superlink, ssl.create_default_context(cafile=str(certificates / CA)))
        #: The newest certificate that was seen of each name.
        self._newest: dict[str, x509.Certificate] = {}
        #: Keys of the nodes that Flower knows, and bytes of the objects in the reply that each is sending.
        self._registered: set[bytes] = set()
        self._uploaded: dict[bytes, int] = {}
        super().__init__(address, certificates, self._handle, "http/1.1")

    async def _handle(self, certificate: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def log_refusal(reply: Reply | None) -> None:
            if reply is not None and 400 <= reply.status < 500:
                self.log_refusal("a request", certificate_name(certificate), reply.body.decode(errors="replace"))

        async def answer(request: Request) -> Reply:
            reply = await self._answer(certificate, request)
            log_refusal(reply)
            return reply

        log_refusal(await serve_requests(reader, writer, answer))

    async def _answer(self, certificate: bytes, request: Request) -> Reply:
        try:
            self.check(certificate)
            key = self._key(certificate)
        except ValueError as error:
            return Reply.refusal(401, str(error))
        signed = base64.b64encode(key).decode()
        if request.headers.get(_PUBLIC_KEY) != signed:
            return Reply.refusal(401, "a node signs with the key of its certificate")
        if request.path == ACTIVATE and key not in self._registered:
            if not await self._register(key, certificate_name(certificate)):
                return Reply.refusal(503, "the node could not be registered")
            self._registered.add(key)
        if request.path == PUSH:
            if reason := _refusal_of_push(request.body):
                return Reply.refusal(403, reason)
            self._uploaded[key] = 0
        elif request.path == PUSH_OBJECT:
            self._uploaded[key] = self._uploaded.get(key, 0) + len(request.body)
            if self._uploaded[key] > LARGEST_REPLY:
                return Reply.refusal(413, "the reply is too large")
        return await self._upstream.ask(request)

    def _key(self, certificate: bytes) -> bytes:
        """The certificate's public key, as Flower writes one. Raises ValueError if its holder has a newer one."""
        found = x509.load_der_x509_certificate(certificate)
        name = certificate_name(certificate)
        newest = self._newest.setdefault(name, found)
        if found.not_valid_before_utc < newest.not_valid_before_utc:
            raise ValueError(f"{name} has a newer certificate: use that")
        self._newest[name] = found
        return found.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    async def _register(self, key: bytes, name: str) -> bool:
        from flwr.proto.control_pb2 import RegisterNodeRequest

        body = RegisterNodeRequest(public_key=key, name=name).SerializeToString()
        reply = await self._upstream.ask(Request(REGISTER, {}, body))
        # A key that was registered before, as after a restart of the gateway alone, is a conflict.
        log.info("registered the node %s: %d", name, reply.status)
        return reply.status < 500


def _refusal_of_push(body: bytes) -> str | None:
    """Why pushed messages are not a node's own replies to orders; None if they are.

    Flower believes a message about who sent it.
    """
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError

    try:
        push = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "this is no message"
    for message in push.messages_list:
        if message.metadata.src_node_id != push.node.node_id or not message.metadata.reply_to_message_id:
            return "a node answers orders, in its own name"
    trees = list(push.message_object_trees)
    for tree in trees:
        trees += tree.children
        if len(trees) > _MOST_OBJECTS:
            return "the reply has too many objects"
    return None


@dataclass
class NodeProxy:
    """A node's end: a proxy on this machine between its SuperNode and the gateway; a context manager.

    Args:
        server: host and port of the gateway.
        certificates: the node's own folder of `make_certificates`.
        local: folder of a certificate for this machine's loopback address, which the SuperNode believes.

    Attributes:
        port: on the loopback address.
    """

    server: str
    certificates: Path
    local: Path
    port: int = field(default=0, init=False)

    def __enter__(self) -> NodeProxy:
        self._upstream = Upstream(self.server, client_context(self.certificates), _CONNECTIONS)
        context = server_context(self.local)
        # No client certificate is asked for: requests are signed with a key that other users of this machine lack.
        context.verify_mode = ssl.CERT_NONE
        self._loop = asyncio.new_event_loop()
        listener = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context, limit=RELAY_BYTES)
        self._server = self._loop.run_until_complete(listener)
        self.port = self._server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="fastdp-node", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve_requests(reader, writer, self._answer)
        except (OSError, asyncio.TimeoutError):
            return
        finally:
            writer.transport.abort()

    async def _answer(self, request: Request) -> Reply:
        reply = await self._upstream.ask(request)
        if reply.status == 401:
            log.error("the server refused this node: %s", quote(reply.body.decode(errors="replace"), 160))
        if request.path == GET_APP and reply.status == 200:
            from flwr.proto.fab_pb2 import GetFabResponse
            from google.protobuf.message import DecodeError

            try:
                check_bundle(GetFabResponse.FromString(reply.body).fab.content)
            except (ValueError, DecodeError) as error:
                log.error("this node runs no app but fastdp's own: %s", error)
                # Flower's word for a run that is none of this node's: it waits for the next.
                return Reply.refusal(403, "this node runs no app but fastdp's own")
        return reply


async def serve_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Callable[[Request], Awaitable[Reply]]
) -> Reply | None:
    """Answer the requests of one connection that are for `PATHS`. Anything else is refused, ends it and is returned.

    Each request is read whole and made anew, so that no byte of a connection reaches Flower as it came.
    """
    connection = h11.Connection(h11.SERVER)
    while True:
        request = await _read_request(connection, reader)
        if request is None:
            return None
        if isinstance(request, Reply):
            # A peer that is gone before it has the refusal is refused all the same, which the caller logs.
            with suppress(OSError, asyncio.TimeoutError):
                await _write_reply(connection, writer, request, [("connection", "close")])
            return request
        task = asyncio.ensure_future(answer(request))
        try:
            while not (await asyncio.wait([task], timeout=INTERIM_SECONDS))[0]:
                writer.write(connection.send(h11.InformationalResponse(status_code=102, headers=[])) or b"")
                await asyncio.wait_for(writer.drain(), ProxyLimits.stall_seconds)
        finally:
            task.cancel()
        await _write_reply(connection, writer, task.result(), [])
        if (connection.our_state, connection.their_state) != (h11.DONE, h11.DONE):
            return None
        connection.start_next_cycle()


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> Request | Reply | None:
    """The next request, the refusal of one, or None if there is none."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return Reply.refusal(400, "this is no request of HTTP/1.1")
        if event is h11.NEED_DATA:
            connection.receive_data(await asyncio.wait_for(reader.read(RELAY_BYTES), _IDLE_SECONDS))
        elif isinstance(event, h11.Request):
            head = event
            if head.method != b"POST" or head.target.decode("latin-1") not in PATHS:
                return Reply.refusal(404, "there is Flower's Fleet API here, and nothing else")
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > _LARGEST_BODY:
                return Reply.refusal(413, "the request is too large")
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
            return Request(head.target.decode("latin-1"), headers, bytes(body))
        else:
            return None


async def _write_reply(
    connection: h11.Connection, writer: asyncio.StreamWriter, reply: Reply, headers: list[tuple[str, str]]
) -> None:
    headers = [("content-type", reply.content_type), ("content-length", str(len(reply.body))), *headers]
    writer.write(connection.send(h11.Response(status_code=reply.status, headers=headers)) or b"")
    view = memoryview(reply.body)
    for at in range(0, len(view), RELAY_BYTES):
        writer.write(connection.send(h11.Data(data=bytes(view[at : at + RELAY_BYTES]))) or b"")
        await asyncio.wait_for(writer.drain(), ProxyLimits.stall_seconds)
    writer.write(connection.send(h11.EndOfMessage()) or b"")
    await asyncio.wait_for(writer.drain(), ProxyLimits.stall_seconds)
