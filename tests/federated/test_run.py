"""Flower's own processes: `flwr run` in simulation; in the slow tier the deployed form, with a client killed in mid-round."""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("flwr", reason="flwr is the optional extra 'federated', for Python 3.11 or later")

from cryptography.x509 import load_pem_x509_certificate
from typer.testing import CliRunner

from fastdp import tls
from fastdp.cli import app as cli
from fastdp.federated import programs as programs_of_flower
from fastdp.federated.bundle import app_folder
from tests.cases import cases
from tests.federated import simulation

APP = app_folder()
Federation = simulation.launch.Federation
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def rows_of(settings):
    return [json.loads(line) for line in (Path(settings["output"]) / "rounds.jsonl").read_text().splitlines()]


SUPERLINK = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


RAY = """
import pathlib, sys, time
tries = pathlib.Path(__file__).with_suffix(".tries")
with open(tries, "a") as file:
    file.write("x")
if len(tries.read_text()) < 3:
    sys.exit("The current node timed out during startup.")
folder = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--temp-dir="))
(pathlib.Path(folder) / "ray_current_cluster").write_text("127.0.0.1:1")
time.sleep(600)
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A SuperLink that is healthy at once, and a Ray that is up at its third start."""
    for name, code in (("flower-superlink", SUPERLINK), ("ray", RAY)):
        (tmp_path / name).write_text(f"#!{sys.executable}\n{code}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(simulation, "program", lambda name: str(tmp_path / name))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_ray_that_is_slow_to_start_is_started_again(programs):
    with simulation.Simulation(programs / "flower") as federation:
        assert (programs / "ray.tries").read_text() == "xxx"
        assert all(process.poll() is None for process in federation.processes.values())
        assert len(list(programs.glob("fastdp-ray-*"))) == 1
    assert all(process.poll() is not None for process in federation.processes.values())
    assert not list(programs.glob("fastdp-ray-*"))


def test_certificates_and_keys_are_what_flower_reads(tmp_path):
    """Flower's own reading of the key; a handshake is in `tests/test_tls_proxy.py`."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, public_key_to_bytes, uses_nist_ec_curve

    tls.make_certificates(tmp_path, ["hospital"], server="server")
    own = tmp_path / "server"
    programs_of_flower.write_key(tmp_path / "hospital", tmp_path / "key")
    public = load_ssh_private_key((tmp_path / "key").read_bytes(), None).public_key()
    assert uses_nist_ec_curve(public)
    certificate = load_pem_x509_certificate((tmp_path / "hospital" / tls.CERTIFICATE).read_bytes())
    assert bytes_to_public_key(public_key_to_bytes(public)) == certificate.public_key()
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert (own / tls.KEY).stat().st_mode & 0o077 == 0


def test_a_server_says_that_stopping_takes_a_while(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def serving(*_, **__):
        yield "localhost:1", Mock(wait=Mock(side_effect=KeyboardInterrupt))

    monkeypatch.setattr(programs_of_flower, "serving", serving)
    result = CliRunner().invoke(cli, ["federated", "server", "--certificates", str(tmp_path)])
    assert result.exit_code == 130
    assert "stopping: this takes up to half a minute" in result.output


@cases(
    "content, words",
    [(None, "is no regular file"), (b"\xff", "codec can't decode"), (b"a=" + b"[" * 3000, "recursion")],
)
def test_settings_of_a_node_that_cannot_be_read(tmp_path_factory, content, words):
    path = tmp_path_factory.mktemp("node") / "node.toml"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    result = CliRunner().invoke(cli, ["federated", "node", str(path), "--certificates", "none"], env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert "node.toml cannot be read: " in result.output
    assert words in result.output


def _kill_when(sign, kill):
    """Wait for a file to appear, then ``kill``."""
    while not sign.exists():
        time.sleep(0.05)
    kill()


@pytest.mark.slow
def test_deployed_with_tls_and_authentication_and_a_client_killed_in_mid_round(settings, world, tmp_path):
    """Three SuperNodes with keys of their own train; one is killed while it trains, and the run goes on to its end.

    A fourth, whose certificate is of another authority, is turned away. Each client has a file of its own.
    """
    texts = (world / "train.jsonl").read_text().splitlines(keepends=True)
    output = Path(settings["output"])
    settings = settings | {
        "rounds": 3, "min_clients": 2, "perturbation": "selective", "partition": "own", "train": "",
        "round_seconds": 90.0, "wait_seconds": 300.0, "local_epochs": 300,
    }  # fmt: skip
    with Federation(tmp_path / "flower", environment=OFFLINE, start_seconds=300) as federation:
        for index in range(3):
            own = tmp_path / f"own-{index}.jsonl"
            own.write_text("".join(texts[8 * index : 8 * index + 8]))
            state = str(tmp_path / f"state-{index}")
            policy = {"perturbation": "selective", "epsilon": 8.0, "model": settings["model"], "local-epochs": 300}
            node = {"train": str(own), "state": state, "partition-id": index} | policy
            federation.add_client(f"client-{index}", node)
        tls.make_certificates(tmp_path / "foreign", ["stranger"])
        federation.start_client("stranger", tmp_path / "foreign" / "stranger", node | {"partition-id": 9})
        # The card is written when the texts are perturbed, just before training begins.
        card = tmp_path / "state-2" / "client-2" / "card.json"
        killer = threading.Thread(target=_kill_when, args=(card, lambda: federation.kill("client-2")), daemon=True)
        killer.start()
        log = federation.run(APP, settings, timeout=1500)
        killer.join(1)
        assert card.exists()
        assert federation.processes["client-2"].poll() is not None
        assert "did not answer" in (tmp_path / "flower" / "stranger.log").read_text()
    assert (output / "run_card.json").exists(), log[-3000:]
    rows = rows_of(settings)
    assert len(rows) == 3
    assert rows[0]["sampled"] == 3
    assert rows[0]["sampled"] == rows[0]["accepted"] + rows[0]["missing"] + len(rows[0]["refused"])
    assert [row["accepted"] for row in rows] == [2, 2, 2]
