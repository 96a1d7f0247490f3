"""Start a simulation, or the deployed form on one machine: `fastdp federated server` and `node` with certificates.

Flower's programs do all the work; this module makes the certificates, chooses free ports and ends what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastdp import tls
from fastdp.federated.programs import CONNECTION, flower_environment, free_port, program

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
        host: that the server of a deployed federation listens at.
        start_seconds: how long a process may take to answer.
        environment: further variables for every process.
    """

    folder: Path
    simulation: bool = False
    start_seconds: float = 120.0
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder).resolve()
        self.port, *self._ray_ports = (free_port() for _ in range(4))
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
        """Host and port that nodes reach, or of the simulation's SuperLink."""
        return f"127.0.0.1:{self.port}"

    @property
    def certificates(self) -> Path:
        """Folder of the authority and of every end."""
        return self.folder / "tls"

    def _start(self) -> None:
        self._home.mkdir(parents=True, exist_ok=True)
        if self.simulation:
            self._start_simulation()
            self._start_ray()
            return
        tls.make_certificates(self.certificates, days=30, server="server")
        arguments = [
            "server",
            "--address",
            f"{self.host}:{self.port}",
            "--certificates",
            str(self.certificates / "server"),
        ]
        process = self._spawn("server", sys.executable, ["-m", "fastdp", "federated", *arguments, "--folder", "."])
        self._wait_until("server", process, lambda: "Fleet API" in self._log("server"))

    @property
    def _home(self) -> Path:
        return self.folder / "flower"

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_simulation(self) -> None:
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        (self._home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n'
            "insecure = true\n",
            encoding="utf-8",
        )
        process = self._spawn("superlink", program("flower-superlink"), [*arguments, "--insecure", "--simulation"])
        self._wait_until("superlink", process, self._healthy)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _wait_until(self, name: str, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        last = time.monotonic() + self.start_seconds
        while time.monotonic() < last and process.poll() is None:
            if ready():
                return
            time.sleep(0.2)
        raise RuntimeError(f"the {name} did not start within {self.start_seconds:g} s:\n{self._log(name)[-2000:]}")

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
        last = time.monotonic() + self.start_seconds
        process = self._spawn("ray", program("ray"), arguments)
        # Ray writes its address there once it is up.
        while not (self._ray_folder / "ray_current_cluster").exists():
            if time.monotonic() >= last:
                raise RuntimeError(f"Ray did not start within {self.start_seconds:g} s:\n{self._log('ray')[-2000:]}")
            if process.poll() is not None:
                _end(process)
                process = self._spawn("ray", program("ray"), arguments)
            time.sleep(0.1)

    def add_client(self, name: str, node_config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Make a certificate for a node and start it.

        Args:
            name: of the client; names its certificate and log.
            node_config: its settings, such as the file it trains on; they do not leave its machine.
        """
        tls.make_certificates(self.certificates, [name], days=30, server="server")
        return self.start_client(name, self.certificates / name, node_config)

    def start_client(self, name: str, certificates: Path, node_config: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        """Start a node with a certificate of the federation's, or one that must be turned away."""
        path = self.folder / f"{name}.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in node_config.items()), "utf-8")
        arguments = ["node", str(path), "--server", self.address, "--certificates", str(certificates)]
        return self._spawn(name, sys.executable, ["-m", "fastdp", "federated", *arguments])

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
            [program("flwr"), *arguments],
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
        """End a client as a power cut would: its node and all it started, at once."""
        process = self.processes[name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End all processes, clients first."""
        for process in reversed(self.processes.values()):
            _end(process)
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def _spawn(self, name: str, command: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as file:
            # A session of its own, so that what the process starts can be ended with it.
            process = subprocess.Popen(
                [command, *arguments],
                env=self._environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def _environment(self) -> dict[str, str]:
        found = flower_environment({**self.environment, "FLWR_HOME": str(self._home)})
        if self.simulation:
            found |= {**_PATIENT, "RAY_ADDRESS": f"127.0.0.1:{self._ray_ports[0]}"}
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
