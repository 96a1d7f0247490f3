"""The two programs of a deployed federation: Flower's SuperLink behind a gateway, and a SuperNode behind a proxy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cryptography.hazmat.primitives import serialization

from fastdp import files, tls
from fastdp.federated.policy import NODE_FILE, NodePolicy
from fastdp.tables import read_rows
from fastdp.validate import host_and_port

#: Name of the connection that ``flwr`` knows the server by.
CONNECTION = "server"
OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
#: Flower's earlier servers, which listen on every address.
_EARLIER_APIS = ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API")


@contextlib.contextmanager
def serving(
    address: str, certificates: Path, folder: Path, *, port: int = 0, start_seconds: float = 120.0
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a SuperLink on this machine's loopback address, and a gateway at ``address``.

    Args:
        address: host and port that nodes reach.
        certificates: the server's own folder of `make_certificates`; it must be for 127.0.0.1 too.
        folder: for Flower's home, whose ``config.toml`` names the connection, and its log.
        port: of the SuperLink; 0 takes a free one.
        start_seconds: how long Flower may take to answer.

    Yields:
        The address with the port that was taken, and the SuperLink.

    Raises:
        RuntimeError: if Flower does not start.
    """
    from fastdp.federated.fleet import Gateway

    tls.server_context(certificates)
    home = folder.resolve() / "flower"
    files.make_folder(home)
    superlink, authority = f"127.0.0.1:{port or free_port()}", certificates.resolve() / tls.CA
    files.write(
        home / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{superlink}"\n'
        f"root-certificates = {json.dumps(str(authority))}\n",
    )
    command = ["flower-superlink", "--host", "127.0.0.1", "--port", superlink.rpartition(":")[2]]
    command += ["--ssl-ca-certfile", str(authority), "--ssl-certfile", str(certificates / tls.CERTIFICATE)]
    command += ["--ssl-keyfile", str(certificates / tls.KEY), "--enable-supernode-auth"]
    command += ["--disable-runtime-dependency-installation"]
    with open(home / "superlink.log", "ab", opener=files.private) as log:
        process = spawn(command, {"FLWR_HOME": str(home)}, log)
    try:
        _wait_until_healthy(process, superlink, authority, home / "superlink.log", start_seconds)
        with Gateway(host_and_port(address), certificates, superlink) as gateway:
            yield f"{address.rpartition(':')[0]}:{gateway.port}", process
    finally:
        end(process)


def run_node(server: str, certificates: Path, node_config: Mapping[str, Any]) -> int:
    """Run a SuperNode behind a `NodeProxy`, until it ends; returns its exit status.

    Args:
        server: host and port of the server's gateway.
        certificates: this node's own folder of `make_certificates`; its key is the SuperNode's too.
        node_config: see `NodePolicy`.

    Raises:
        ValueError: for certificates that cannot be used, and what `NodePolicy` refuses.
    """
    from fastdp.federated.fleet import NodeProxy

    policy = NodePolicy.read(node_config)
    if policy is None:
        raise ValueError("num_partitions marks a client of a simulation: leave it out of the node config")
    # A round would fail on it, long after.
    read_rows(policy.train).column(policy.text_column, "text-column")
    host_and_port(server)
    with tempfile.TemporaryDirectory(prefix="fastdp-node-") as place:
        folder = Path(place)
        write_key(certificates, folder / "key")
        # A file, since every user of a machine may read its command lines, and what Flower hands to a client app.
        files.write(folder / "node.toml", "".join(f"{k} = {json.dumps(v)}\n" for k, v in node_config.items()))
        tls.make_certificates(folder, hosts=["127.0.0.1"], days=3650, server="local")
        with NodeProxy(server, certificates, folder / "local") as proxy:
            command = ["flower-supernode", "--superlink", f"127.0.0.1:{proxy.port}"]
            command += ["--root-certificates", str(folder / "local" / tls.CA)]
            command += ["--auth-supernode-private-key", str(folder / "key")]
            command += ["--host", "127.0.0.1", "--port", str(free_port())]
            process = spawn(command, {"FLWR_HOME": str(folder / "flower"), NODE_FILE: str(folder / "node.toml")})
            try:
                return process.wait()
            finally:
                end(process, patience=5.0)


def write_key(certificates: Path, path: Path) -> None:
    """The node's key in the form that Flower reads."""
    own = tls.Credentials.load(certificates)
    key: Any = serialization.load_pem_private_key(own.key, None)
    plain = serialization.NoEncryption()
    files.write(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, plain))


def spawn(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start one of Flower's programs. Whoever signals this process's group reaches it too."""
    return subprocess.Popen(
        [program(command[0]), *command[1:]],
        env=flower_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
    )


def flower_environment(further: Mapping[str, str]) -> dict[str, str]:
    """Variables for Flower's programs: nothing is sent, looked up or installed, and only the named servers listen."""
    # Flower starts its helpers by name, so they must be found where this Python's programs are.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    kept = {name: value for name, value in os.environ.items() if name not in _EARLIER_APIS}
    return {**kept, **OFF, "PATH": path, **further}


def program(name: str) -> str:
    """Path of one of Flower's programs. Raises ImportError if Flower is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ImportError("federated runs need Flower, on Python 3.11 or later: pip install 'fastdp-lm[federated]'")
    return found


def end(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ask a process to end, and see that it does; Flower's own helpers follow it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        process.kill()
        process.wait()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(
    process: subprocess.Popen[bytes], superlink: str, authority: Path, log: Path, seconds: float
) -> None:
    context = ssl.create_default_context(cafile=str(authority))
    last = time.monotonic() + seconds
    while time.monotonic() < last and process.poll() is None:
        try:
            with urllib.request.urlopen(f"https://{superlink}/health", timeout=5, context=context):
                return
        except OSError:
            time.sleep(0.2)
    shown = log.read_text(errors="replace")[-2000:]
    raise RuntimeError(f"Flower's SuperLink did not start within {seconds:g} s:\n{shown}")
