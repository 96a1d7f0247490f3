"""A running server as others meet it: Fleet with a client certificate, and nothing else of Flower's."""

import asyncio
import base64
import contextlib
import importlib
import io
import json
import os
import socket
import ssl
import sys
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is the optional extra 'federated', for Python 3.11 or later")

import httpx
from cryptography.x509 import load_pem_x509_certificate
from flwr.cli.build import build_fab_from_disk
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as ProtoMessage, Metadata, ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fastdp import tls
from fastdp.federated import fleet
from fastdp.federated.bundle import app_folder, bundle_digest, check_bundle, own_digest
from fastdp.federated.fleet import PATHS, Gateway
from fastdp.federated.programs import free_port
from tests.cases import cases

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "federated"))
Federation = importlib.import_module("launch").Federation
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
FOREIGN = {
    "pyproject.toml": (app_folder() / "pyproject.toml").read_text(),
    "server_app.py": """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        pass
    replies = grid.send_and_receive([Message(RecordDict(), nodes[0], "train")], timeout=20)
    print("replies", [reply.has_error() for reply in replies])
""",
    "client_app.py": """
import os
import pathlib
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    pathlib.Path({sign!r}).write_text(pathlib.Path(os.environ["FASTDP_NODE_FILE"]).read_text())
    return message
""",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A server with a certificate for one node, hospital."""
    folder = tmp_path_factory.mktemp("federation")
    with Federation(folder / "run", environment=OFFLINE, start_seconds=300, host="0.0.0.0") as running:
        tls.make_certificates(running.certificates, ["hospital", "clinic"], server="server")
        yield running


def client(federation, name=None, folder=None):
    """Of the gateway, with a certificate if it has a name."""
    folder = folder or federation.certificates
    context = ssl.create_default_context(cafile=str(federation.certificates / "server" / tls.CA))
    if name:
        context.load_cert_chain(folder / name / tls.CERTIFICATE, folder / name / tls.KEY)
    return httpx.Client(base_url=f"https://{federation.address}", verify=context, timeout=60)


def listeners(pids):
    """Addresses in hex, and ports, that processes listen at."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def session_of(pid):
    """Processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_stranger_with_the_authority_s_public_certificate_gets_nothing(federation, tmp_path):
    """Any request at all fails in the handshake."""
    tls.make_certificates(tmp_path / "foreign", ["hospital"])
    for name, folder in ((None, None), ("hospital", tmp_path / "foreign")):
        for path in ("/health", *PATHS):
            with client(federation, name, folder) as stranger, pytest.raises(httpx.TransportError):
                stranger.post(path)
    assert json.loads(federation.flwr("list", "server", "--format", "json"))["runs"] == []


def test_a_node_reaches_fleet_and_nothing_else(federation):
    """With a good certificate Control, Runtime and the documentation are not there, nor is another's key taken."""
    with client(federation, "hospital") as node:
        for path in (
            "/v1/control/start-run", "/v1/control/register-node", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
            "/v1/runtime/get-run", "/health", "/docs", "/openapi.json", "/v1/fleet/../control/start-run",
            "/v1/fleet/get-run/../../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "//v1/fleet/get-run",
            "/v1/fleet/get-run?x=1",
        ):  # fmt: skip
            url = httpx.URL(f"https://{federation.address}").copy_with(raw_path=path.encode())
            assert node.post(url).status_code in (400, 404), path
        assert node.get("/v1/fleet/get-run").status_code == 404
        reply = node.post("/v1/fleet/activate-node", headers={"flwr-public-key": "AAAA"})
        assert (reply.status_code, "key of its certificate" in reply.text) == (401, True)


@cases(
    "source, answers, objects, status",
    [
        (5, "the order", 1, 503),
        # Flower believes whom a message says that it is from.
        (6, "the order", 1, 403),
        (1, "", 1, 403),
        (5, "", 1, 403),
        (5, "the order", 20_000, 403),
        (None, None, None, 403),
    ],
)
def test_a_node_answers_orders_in_its_own_name(tmp_path_factory, source, answers, objects, status):
    folder = tmp_path_factory.mktemp("gateway")
    tls.make_certificates(folder, ["hospital"], server="server")
    body = b"\xff"
    if source is not None:
        message = ProtoMessage(metadata=Metadata(src_node_id=source, reply_to_message_id=answers))
        tree = ObjectTree(object_id="0", children=[ObjectTree(object_id="1")] * objects)
        push = PushMessagesRequest(node=Node(node_id=5), messages_list=[message], message_object_trees=[tree])
        body = push.SerializeToString()
    with own_gateway(folder) as node:
        assert node.post("/v1/fleet/push-messages", content=body).status_code == status


def test_a_node_s_reply_is_bounded_and_refusals_are_logged(tmp_path, monkeypatch, caplog):
    """Flower keeps its objects in memory."""
    monkeypatch.setattr(fleet, "LARGEST_REPLY", 2500)
    tls.make_certificates(tmp_path, ["hospital"], server="server")
    push = PushMessagesRequest(node=Node(node_id=5)).SerializeToString()
    with own_gateway(tmp_path) as node:
        for _ in range(2):
            assert node.post("/v1/fleet/push-messages", content=push).status_code == 503
            found = [node.post("/v1/fleet/push-object", content=bytes(1000)).status_code for _ in range(3)]
            assert found == [503, 503, 413]
    assert 'a request of hospital was refused: {"detail": "the reply is too large"}' in caplog.text
    caplog.clear()
    with own_gateway(tmp_path) as node:
        assert node.post("/v1/control/start-run").status_code == 404
        end = time.monotonic() + 20
        # It is logged when the connection ends.
        while "there is Flower's Fleet API here, and nothing else" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.01)


@contextlib.contextmanager
def own_gateway(folder):
    """A client of a gateway of this process, behind which nothing answers."""
    key = load_pem_x509_certificate((folder / "hospital" / tls.CERTIFICATE).read_bytes()).public_key()
    headers = {"flwr-public-key": base64.b64encode(public_key_to_bytes(key)).decode()}
    context = ssl.create_default_context(cafile=str(folder / "server" / tls.CA))
    context.load_cert_chain(folder / "hospital" / tls.CERTIFICATE, folder / "hospital" / tls.KEY)
    with Gateway(("127.0.0.1", 0), folder / "server", f"127.0.0.1:{free_port()}") as gateway:
        url = f"https://127.0.0.1:{gateway.port}"
        with httpx.Client(base_url=url, verify=context, timeout=60, headers=headers) as node:
            yield node


def test_requests_are_made_anew(federation):
    """What follows a request in its bytes is not smuggled past the list of paths."""
    context = ssl.create_default_context(cafile=str(federation.certificates / "server" / tls.CA))
    own = federation.certificates / "hospital"
    context.load_cert_chain(own / tls.CERTIFICATE, own / tls.KEY)
    host, port = federation.address.split(":")
    inner = b"POST /v1/control/list-runs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    outer = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n"
    for head in (
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 10\r\n\r\n",
        b"Content-Length: 0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n",
    ):
        with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as raw:
            raw.settimeout(60)
            raw.sendall(outer + head + inner)
            found = b""
            while part := raw.recv(1 << 16):
                found += part
        statuses = [line.split()[1] for line in found.split(b"\r\n") if line.startswith(b"HTTP/1.1")]
        assert statuses
        assert set(statuses) <= {b"400", b"401", b"404", b"501"}, statuses


def test_only_the_gateway_listens_beyond_this_machine(federation):
    own = listeners(session_of(federation.processes["server"].pid))
    assert {port for address, port in own if address not in ("0100007F", "0" * 24 + "01000000")} == {federation.port}
    assert len(own) >= 2


def test_what_a_server_keeps_is_its_owners_alone(federation):
    """Its log and its settings, beside the keys: other users of the machine may stand in its folder."""
    for name in ("config.toml", "superlink.log"):
        (path,) = federation.certificates.parent.rglob(name)
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_a_node_runs_no_app_but_its_own(federation, tmp_path):
    """Whoever reaches Control is the server; the texts still do not leave by an app of theirs."""
    sign, texts = tmp_path / "stolen", tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a private text"}) + "\n")
    (tmp_path / "app").mkdir()
    for name, content in FOREIGN.items():
        (tmp_path / "app" / name).write_text(content.replace("{sign!r}", repr(str(sign))))
    node = {"train": str(texts), "state": str(tmp_path / "state"), "perturbation": "all", "epsilon": 8.0}
    node["model"] = str(tmp_path)
    process = federation.add_client("hospital", node)
    log = federation.run(tmp_path / "app", {"model": "x", "output": "y"}, timeout=300)
    end = time.monotonic() + 120
    while "no app but" not in federation.log("hospital") and time.monotonic() < end:
        time.sleep(0.1)
    assert "this node runs no app but fastdp's own" in federation.log("hospital"), log[-2000:]
    assert not sign.exists()
    assert process.poll() is None


def test_a_slow_reply_gives_signs_and_a_slow_request_is_read(monkeypatch):
    """Flower's client gives up after 30 seconds of silence: an object on a slow line takes longer."""
    monkeypatch.setattr(fleet, "INTERIM_SECONDS", 0.05)

    async def answer(request):
        await signs.wait()
        return fleet.Reply(200, request.body[::-1])

    async def serve(reader, writer):
        write = writer.write

        def counted(data):
            seen.append(data)
            if b"".join(seen).count(b" 102 ") >= 3:
                signs.set()
            write(data)

        writer.write = counted
        await fleet.serve_requests(reader, writer, answer)
        writer.close()

    async def ask():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/fleet/push-object"
        async with server, httpx.AsyncClient(timeout=60) as client:
            return [(await client.post(url, content=body)).content for body in (b"abc", bytes(1 << 20))]

    seen, signs = [], asyncio.Event()
    assert asyncio.run(ask()) == [b"cba", bytes(1 << 20)]
    assert signs.is_set()


def changed(bundle, edit):
    """A bundle with other entries."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in edit(entries):
            archive.writestr(name, content)
    return target.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_apps_that_are_not_this_install_s():
    own = build_fab_from_disk(app_folder())
    check_bundle(own)
    # Compression and order do not count.
    check_bundle(changed(own, lambda entries: entries[::-1]))
    for edit in (
        lambda entries: [(n, c + b"\nimport os" if n == "client_app.py" else c) for n, c in entries],
        lambda entries: [*entries, ("fastdp.py", b"import os")],
        lambda entries: [*entries, ("client_app.py", b"import os")],
        lambda entries: [(n, c) for n, c in entries if n != "server_app.py"],
        lambda entries: [*entries, ("large", b"x" * (2 << 20))],
    ):
        with pytest.raises(ValueError, match="another app|twice|is the most"):
            check_bundle(changed(own, edit))
    for content in (b"", b"garbage", own[:100], bytes(2 << 20)):
        with pytest.raises(ValueError, match="cannot be opened|is the most"):
            check_bundle(content)
    assert bundle_digest(own) == own_digest()
