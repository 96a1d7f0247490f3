"""`fastdp split`: what its programs say and refuse; `tests/test_commands.py` runs both in processes of their own."""

import csv
import json
import socket

import pytest

from fastdp import accounting
from fastdp.split.customer import SplitCustomer
from fastdp.tls import Revocations
from tests.split.world import make_model, make_texts, make_tokenizer
from tests.test_cli import refused, run, told


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model's folder and a file of labelled texts."""
    folder = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    with open(folder / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *zip(*make_texts(24))])
    return folder


def test_contributing_tokens_of_private_texts_are_counted_once(world, service, tmp_path):
    folder = tmp_path / "c"
    start = ("split", "customer", "--insecure", "--address", service.address, "--folder", folder, "--eta", 9)
    start += ("--tokenizer", world / "model", "--cti", "prior", "--batch-size", 8)
    data = ("--train", world / "train.csv", "--epochs", 1)
    assert "counts of the private texts reveal them" in refused(*start, *data)
    assert "leave out --noise rows" in refused(*start, *data, "--cti-noise", 1, "--noise", "rows")
    assert "counts the texts of --train" in refused(*start, "--cti-noise", 1, "--predict", world / "train.csv")
    assert told(*start, *data, "--cti-noise", 1)
    kept = (folder / "counts.pt").read_bytes()
    statement = json.loads((folder / "statement.json").read_text())
    assert statement["guarantee"].startswith("metric")
    assert statement["also"][0]["epsilon"]["upper_bound"] == pytest.approx(
        accounting.epsilon(accounting.gaussian(1.0), 1e-5)
    )
    # Another draw would be another release, and another privatizer than the run was begun with.
    for more in (data, ("--predict", world / "train.csv")):
        assert told(*start, *more, "--cti-noise", 1)
    assert (folder / "counts.pt").read_bytes() == kept
    assert "made with another --cti, --cti-noise or --cells" in refused(*start, *data, "--cti-noise", 2)
    public = (*start, *data, "--cti-public")
    assert "the private data itself" in refused(*public, world / "train.csv")
    head, *rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "public.csv").write_text("\n".join([head, *rows[::-1]]) + "\n")
    assert "are private ones" in refused(*public, tmp_path / "public.csv")
    assert "other privatizer" in refused(*public, tmp_path / "public.csv", "--public-overlap", len(rows))


def test_the_unchanged_share_is_shown_before_anything_leaves(world, service, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise ValueError("nothing was sent yet")

    monkeypatch.setattr(SplitCustomer, "send", stop)
    start = ("split", "customer", "--insecure", "--address", service.address, "--folder", tmp_path / "c")
    start += ("--tokenizer", world / "model")
    result = run(*start, "--eta", 1e6, "--batch-size", 8, "--train", world / "train.csv")
    assert "nothing was sent yet" in result.stderr
    assert "100.0% of the vocabulary's tokens stay what they were" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("program", "server", "client"), [("split", "vendor", "customer"), ("federated", "server", "node")]
)
def test_certificates_are_made_renewed_and_revoked(tmp_path, program, server, client):
    folder = tmp_path / "c"
    make = (program, "certificates", folder, f"--{client}")
    assert told(*make, "alice", "--host", "vendor.example")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["alice", "authority", server])
    assert "has all of these already" in told(*make, "alice")
    assert "cannot name a client" in refused(*make, "../x")
    first = (folder / "alice" / "certificate.pem").read_bytes()
    assert told(program, "renew", folder, "--name", "alice", "--name", server)
    assert (folder / "alice" / "certificate.pem").read_bytes() != first
    assert told(program, "revoke", folder, "--name", "alice")
    with pytest.raises(ValueError, match="revoked"):
        Revocations(folder / server).check(first)
    for command, name in (("renew", "carol"), ("revoke", "carol"), ("revoke", server)):
        assert refused(program, command, folder, "--name", name)


def test_refusals(world, tmp_path):
    vendor = ("split", "vendor", "--model", world / "model", "--folder", tmp_path / "v")
    assert "--certificates" in refused(*vendor)
    assert "there is no folder" in refused(*vendor, "--certificates", tmp_path / "none", "--address", "0.0.0.0:7443")
    assert "this machine alone" in refused(*vendor, "--insecure", "--address", "0.0.0.0:7443")
    customer = ("split", "customer", "--folder", tmp_path / "c")
    assert "--eta is missing" in refused(*customer, "--insecure", "--train", world / "train.csv")
    assert "name the texts" in refused(*customer, "--insecure", "--output", tmp_path / "out.jsonl")
    texts = ("--eta", 1, "--train", world / "train.csv")
    assert "--tokenizer is missing" in refused(*customer, *texts)
    assert "give a folder of certificates" in refused(*customer, *texts, "--tokenizer", world / "model")
    assert "has no certificates" in refused(*customer, "--eta", 1, "--certificates", tmp_path / "none")
    with socket.socket() as silent:
        # Bound, and nobody listens there.
        silent.bind(("127.0.0.1", 0))
        nobody = ("--address", f"127.0.0.1:{silent.getsockname()[1]}", "--patience", 0.2)
        assert "did not answer within 0.2 seconds" in refused(*customer, "--insecure", "--eta", 1, *nobody)
