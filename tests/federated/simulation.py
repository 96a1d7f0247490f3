"""A federation whose clients Flower simulates on this machine, one at a time, as readers of docs/federated.md run it.

A simulation's clients run on Ray, which is started here before any run, and which Flower then finds. Ray gives its own
daemon a fixed half minute to start. On a busy machine that may not do, so such a start is tried again, for as long as
``start_seconds``; nothing has been trained by then, and no client knows of it.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from fastdp.federated.programs import CONNECTION, free_port, program

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "federated"))
launch = importlib.import_module("launch")

#: Ray gives up on parts of itself that are slow to answer, as they are on a machine that is busy with something else.
PATIENT = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000",
}


class Simulation(launch.Federation):
    """Flower's SuperLink and Ray's head node. Ray's files, whose paths must be short, are in a temporary folder."""

    def start(self):
        self.ray_port = free_port()
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{self.address}"\n'
            "insecure = true\n",
            encoding="utf-8",
        )
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        process = self.spawn("superlink", program("flower-superlink"), [*arguments, "--insecure", "--simulation"])
        self.wait_until("superlink", process, self._healthy)
        self._start_ray()

    def _healthy(self):
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _start_ray(self):
        self.ray_folder = Path(tempfile.mkdtemp(prefix="fastdp-ray-"))
        options = {
            "port": self.ray_port, "ray-client-server-port": free_port(), "dashboard-agent-listen-port": free_port(),
            "node-ip-address": "127.0.0.1", "num-cpus": 1, "object-store-memory": 1 << 28, "include-dashboard": "false",
            "temp-dir": self.ray_folder,
        }  # fmt: skip
        arguments = ["start", "--head", "--block", "--no-monitor"]
        arguments += [f"--{name}={value}" for name, value in options.items()]
        last = time.monotonic() + self.start_seconds
        process = self.spawn("ray", program("ray"), arguments)
        # Ray writes its address there once it is up.
        while not (self.ray_folder / "ray_current_cluster").exists():
            if time.monotonic() >= last:
                raise RuntimeError(f"Ray did not start within {self.start_seconds:g} s:\n{self.log('ray')[-2000:]}")
            if process.poll() is not None:
                launch.end_session(process)
                process = self.spawn("ray", program("ray"), arguments)
            time.sleep(0.1)

    def variables(self):
        return super().variables() | PATIENT | {"RAY_ADDRESS": f"127.0.0.1:{self.ray_port}"}

    def close(self):
        super().close()
        if hasattr(self, "ray_folder"):
            shutil.rmtree(self.ray_folder, ignore_errors=True)
