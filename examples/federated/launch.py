"""A whole federation on one machine: `fastdp federated server` and `node`, with certificates.

Flower's programs do all the work; this module makes the certificates, chooses a free port and ends what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from fastdp import tls
from fastdp.federated.programs import CONNECTION, flower_environment, free_port, program


@dataclass
class Federation:
    """Flower's processes below one folder; a context manager that ends them all.

    Args:
        folder: for Flower's home, certificates, keys and logs.
        start_seconds: how long the server may take to answer.
        host: that the server listens at.
        environment: further variables for every process.
    """

    folder: Path
    start_seconds: float = 120.0
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder).resolve()
        self.port = free_port()
        self.home = self.folder / "flower"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Federation:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self.start()
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
        """Host and port that nodes reach."""
        return f"127.0.0.1:{self.port}"

    @property
    def certificates(self) -> Path:
        """Folder of the authority and of every end."""
        return self.folder / "tls"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        tls.make_certificates(self.certificates, days=30, server="server")
        arguments = [
            "server",
            "--address",
            f"{self.host}:{self.port}",
            "--certificates",
            str(self.certificates / "server"),
        ]
        process = self.spawn("server", sys.executable, ["-m", "fastdp", "federated", *arguments, "--folder", "."])
        self.wait_until("server", process, lambda: "Fleet API" in self.log("server"))

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_until(self, name: str, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        """Raise RuntimeError if a process ends before it is ready, or takes too long."""
        last = time.monotonic() + self.start_seconds
        while time.monotonic() < last and process.poll() is None:
            if ready():
                return
            time.sleep(0.2)
        raise RuntimeError(f"the {name} did not start within {self.start_seconds:g} s:\n{self.log(name)[-2000:]}")

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
        return self.spawn(name, sys.executable, ["-m", "fastdp", "federated", *arguments])

    def run(self, app: Path, settings: Mapping[str, Any], timeout: float = 3600) -> str:
        """``flwr run`` with these settings of the run config, to its end; returns its log.

        Raises RuntimeError if ``flwr run`` itself fails; a failure inside the run is in the log.
        """
        path = self.folder / "run_config.toml"
        path.write_text("".join(f"{k.replace('_', '-')} = {json.dumps(v)}\n" for k, v in settings.items()), "utf-8")
        return self.flwr("run", str(app), CONNECTION, "--stream", "--run-config", str(path), timeout=timeout)

    def flwr(self, *arguments: str, timeout: float = 120) -> str:
        """One command of Flower's, with this federation's home; returns what it prints. Raises RuntimeError if it fails."""
        found = subprocess.run(
            [program("flwr"), *arguments],
            env=self.variables(),
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
            end_session(process)

    def spawn(self, name: str, command: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process that writes to a log of its own."""
        with open(self.folder / f"{name}.log", "ab") as file:
            # A session of its own, so that what the process starts can be ended with it.
            process = subprocess.Popen(
                [command, *arguments],
                env=self.variables(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def variables(self) -> dict[str, str]:
        """The environment of every process."""
        return flower_environment({**self.environment, "FLWR_HOME": str(self.home)})


def end_session(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
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
