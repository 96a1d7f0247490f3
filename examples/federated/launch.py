"""Start Flower's own processes: a SuperLink for a simulation, or one with SuperNodes under TLS and node authentication.

Flower's programs do all the work; this module writes their keys, chooses free ports, keeps telemetry,
update checks and the installation of packages at start off, and ends what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastdp import files, tls

CONNECTION = "fastdp"
_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
#: Ray gives up on parts of itself that are slow to answer, as they are on a machine that is busy with something else.
_PATIENT = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000",
}


@dataclass
class Federation:
    """Flower's processes below one folder; a context manager that ends them all.

    A simulation's clients run on Ray, which is started here before any run, and which Flower then finds. Ray gives its own
    daemon a fixed half minute to start. On a busy machine that may not do, so such a start is tried again, for as long as
    ``start_seconds``; nothing has been trained by then, and no client knows of it.

    Args:
        folder: for Flower's home, certificates, keys and logs. Ray's files, whose paths must be short, are below the
            system's temporary folder, and are removed at the end.
        simulation: clients are simulated on this machine, one at a time, instead of connecting.
        start_seconds: how long a process may take to answer.
        environment: further variables for every process.
    """

    folder: Path
    simulation: bool = False
    start_seconds: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder).resolve()
        self.port, *self._ray_ports = free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ray_folder: Path | None = None

    def __enter__(self) -> Federation:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Host and port of the SuperLink."""
        return f"127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        """Of the authority that signed the SuperLink's certificate."""
        return self._own / tls.CA

    @property
    def _own(self) -> Path:
        return self.folder / "tls" / "superlink"

    def _start(self) -> None:
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.simulation:
            arguments += ["--insecure", "--simulation"]
            secured = "insecure = true"
        else:
            tls.make_certificates(self._own.parent, server=self._own.name, days=30)
            arguments += ["--ssl-ca-certfile", str(self.certificate), "--enable-supernode-auth"]
            arguments += ["--ssl-certfile", str(self._own / tls.CERTIFICATE), "--ssl-keyfile", str(self._own / tls.KEY)]
            secured = f"root-certificates = {json.dumps(str(self.certificate))}"
        (self.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n{secured}\n',
            encoding="utf-8",
        )
        self._spawn("superlink", "flower-superlink", arguments)
        if self.simulation:
            self._start_ray()
        self._wait_until_healthy()

    def _start_ray(self) -> None:
        """Ray's head node for one client at a time."""
        self._ray_folder = Path(tempfile.mkdtemp(prefix="fastdp-ray-"))
        port, client_port, agent_port = self._ray_ports
        options = {
            "port": port, "ray-client-server-port": client_port, "dashboard-agent-listen-port": agent_port,
            "node-ip-address": "127.0.0.1", "num-cpus": 1, "object-store-memory": 1 << 28, "include-dashboard": "false",
            "temp-dir": self._ray_folder,
        }  # fmt: skip
        arguments = ["start", "--head", "--block", "--no-monitor"]
        arguments += [f"--{name}={value}" for name, value in options.items()]
        end = time.monotonic() + self.start_seconds
        process = self._spawn("ray", "ray", arguments)
        # Ray writes its address there once it is up.
        while not (self._ray_folder / "ray_current_cluster").exists():
            if time.monotonic() >= end:
                log = (self.folder / "ray.log").read_text(errors="replace")
                raise RuntimeError(f"Ray did not start within {self.start_seconds:g} s:\n{log[-2000:]}")
            if process.poll() is not None:
                _end(process)
                process = self._spawn("ray", "ray", arguments)
            time.sleep(0.1)

    def add_client(self, name: str, node_config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Make a key pair, register its public half, and start a SuperNode that proves it holds the other.

        Args:
            name: of the client; names its key and log.
            node_config: its settings, such as the file it trains on; they do not leave its machine.
        """
        private, public = make_node_key(self.folder / "keys", name)
        self.flwr("supernode", "register", str(public), CONNECTION)
        return self.start_client(name, private, node_config)

    def start_client(self, name: str, private_key: Path, node_config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start a SuperNode whose key is registered, or one that must be turned away."""
        values = " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())
        arguments = ["--superlink", self.address, "--root-certificates", str(self.certificate)]
        arguments += ["--auth-supernode-private-key", str(private_key), "--node-config", values]
        return self._spawn(name, "flower-supernode", [*arguments, "--port", str(free_ports(1)[0])])

    def run(self, app: Path, settings: Mapping[str, Any], clients: int | None = None, timeout: float = 3600) -> str:
        """``flwr run`` with these settings, to its end; returns its log.

        Args:
            app: folder of the Flower app.
            settings: of the run config, with underscores or dashes.
            clients: number of simulated clients.
            timeout: seconds.

        Raises:
            RuntimeError: if ``flwr run`` itself fails; a failure inside the run is in the log.
            subprocess.TimeoutExpired: past the timeout.
        """
        path = self.folder / "run_config.toml"
        path.write_text("".join(f"{k.replace('_', '-')} = {json.dumps(v)}\n" for k, v in settings.items()), "utf-8")
        arguments = ["run", str(app), CONNECTION, "--stream", "--run-config", str(path)]
        if clients is not None:
            arguments += ["--federation-config", f"num-supernodes={clients} client-resources-num-cpus=1"]
        return self.flwr(*arguments, timeout=timeout)

    def flwr(self, *arguments: str, timeout: float = 120) -> str:
        """One command of Flower's, with this federation's home; returns what it prints. Raises RuntimeError if it fails."""
        found = subprocess.run(
            [_program("flwr"), *arguments],
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
        text = found.stdout.decode(errors="replace")
        if found.returncode:
            raise RuntimeError(f"flwr {arguments[0]} failed:\n{text[-2000:]}")
        return text

    def kill(self, name: str) -> None:
        """End a client as a power cut would: its SuperNode and all it started, at once."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes, clients first."""
        for process in reversed(self.processes.values()):
            _end(process)
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def _spawn(self, name: str, program: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        with open(log, "ab") as file:
            # A session of its own, so that what the process starts can be ended with it.
            process = subprocess.Popen(
                [_program(program), *arguments],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def _environment(self) -> dict[str, str]:
        # Flower starts its helpers by name, so they must be found where this Python's programs are.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        found = {**os.environ, **_OFF, **self.environment, "PATH": path, "FLWR_HOME": str(self.folder / "home")}
        if self.simulation:
            found |= {**_PATIENT, "RAY_ADDRESS": f"127.0.0.1:{self._ray_ports[0]}"}
        return found

    def _wait_until_healthy(self) -> None:
        context = None if self.simulation else ssl.create_default_context(cafile=str(self.certificate))
        url = f"http{'' if self.simulation else 's'}://{self.address}/health"
        end = time.monotonic() + self.start_seconds
        while time.monotonic() < end:
            if self.processes["superlink"].poll() is not None:
                break
            try:
                with urllib.request.urlopen(url, timeout=5, context=context):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        log = (self.folder / "superlink.log").read_text(errors="replace")
        raise RuntimeError(f"the SuperLink did not start within {self.start_seconds:g} s:\n{log[-2000:]}")


def free_ports(count: int) -> list[int]:
    """Different TCP ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A SuperNode's key pair (P-384, OpenSSH form): paths of the private and the public half."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    pem, ssh, plain = serialization.Encoding.PEM, serialization.Encoding.OpenSSH, serialization.NoEncryption()
    files.write(private, key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain))
    files.write(public, key.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH), public=True)
    return private, public


def _program(name: str) -> str:
    """Path of one of Flower's programs. Raises ImportError if Flower is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ImportError("federated runs need Flower, on Python 3.11 or later: pip install 'fastdp-lm[federated]'")
    return found


def _end(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """Ask a process and all of its session to end, and see that they do."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
