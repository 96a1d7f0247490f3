"""`fastdp split`: vendor and customer in processes of their own, over TLS, killed and started again."""

import contextlib
import csv
import json
import multiprocessing
import os
import random
import signal
import socket
import time

import pytest
import torch
from safetensors.torch import load_file

from fastdp import accounting
from fastdp.commands.split import load_model_and_tokenizer
from fastdp.split.customer import SplitCustomer, batch_of
from fastdp.split.run import RUN_FILE
from fastdp.split.store import ExampleStore
from fastdp.tls import Revocations
from tests.split.world import make_model, make_texts, make_tokenizer, train_in_process
from tests.test_cli import refused, run

EPOCHS, EXAMPLES, BATCH = 20, 24, 8
STEPS = EPOCHS * EXAMPLES // BATCH


def command(arguments, log):
    """In a child process: the command line, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from fastdp.cli import app

    app([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model's folder and a file of labelled texts."""
    folder = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    with open(folder / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("sentence", "label"), *zip(*make_texts(EXAMPLES))])
    return folder


@pytest.fixture(scope="module")
def processes():
    """Starts commands in processes forked from one that has imported everything, and ends them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastdp.split", "fastdp.split.service", "fastdp.cli", "transformers.models.bert"])
    started = []

    def start(log, *arguments):
        process = context.Process(target=command, args=(arguments, log), daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.join(10)


def free_port():
    """Below those that systems hand out by themselves: nobody gets it while the vendor is down."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def wait_for(condition, process, log, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def losses_by_step(folder):
    path = folder / "losses.jsonl"
    # The last line may be half written.
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in rows}, len(rows)


@pytest.mark.slow
def test_two_processes_train_over_tls_and_survive_kills(world, processes, tmp_path):
    """kill -9 of the vendor twice and of the customer once: the run is bit for bit that of one process without stops."""
    address = f"localhost:{free_port()}"
    vendor_log, customer_log = tmp_path / "vendor.log", tmp_path / "customer.log"
    folder = tmp_path / "customer"

    def vendor():
        options = ("--folder", tmp_path / "vendor", "--address", address, "--certificates", tmp_path / "certificates")
        process = processes(vendor_log, "split", "vendor", "--model", world / "model", "--max-tokens", 16, *options)
        wait_for(lambda: vendor_log.read_text().count("serving") == started + 1, process, vendor_log)
        return process

    def customer():
        options = ("--folder", folder, "--address", address, "--certificates", tmp_path / "certificates" / "customer")
        public = ("--tokenizer", world / "model", "--published", world / "model")
        train = ("--train", world / "train.csv", "--epochs", EPOCHS, "--batch-size", BATCH, "--eta", 30, *public)
        return processes(customer_log, "split", "customer", *options, *train, "--eval", world / "train.csv")

    vendor_log.touch()
    started = 0
    serving, training = vendor(), customer()
    for stopped, after in (("vendor", 8), ("customer", 20), ("vendor", 36)):
        wait_for(lambda after=after: losses_by_step(folder)[1] >= after, training, customer_log)
        victim = serving if stopped == "vendor" else training
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        if stopped == "vendor":
            started += 1
            serving = vendor()
        else:
            assert losses_by_step(folder)[1] < STEPS
            training = customer()
    training.join(120)
    assert training.exitcode == 0, customer_log.read_text()
    assert "accuracy" in customer_log.read_text()
    # An orderly stop ends it too.
    serving.terminate()
    serving.join(30)
    assert serving.exitcode == 130, vendor_log.read_text()

    losses, written = losses_by_step(folder)
    # A customer killed between a step's answer and its line in the file lacks that line; the step itself is not lost.
    missing = set(range(1, STEPS + 1)) - set(losses)
    assert len(missing) <= 1
    assert written == len(losses) == STEPS - len(missing)
    store = ExampleStore(folder / "released", 16, torch.float32)
    batches = [batch_of(step, EXAMPLES, BATCH, 0) for step in range(STEPS)]
    model, _ = load_model_and_tokenizer(str(world / "model"), 2, 0)
    expected, adapter = train_in_process(model, store, make_texts(EXAMPLES)[1], batches)
    store.close()
    assert losses == {step: expected[step - 1] for step in losses}
    kept = load_file(tmp_path / "vendor" / "customers" / "customer" / RUN_FILE)
    assert all(torch.equal(kept[f"parameter/{name}"], value) for name, value in adapter.items())
    statement = json.loads((folder / "statement.json").read_text())
    assert (statement["examples_sent"], statement["texts_sent_for_prediction"]) == (EXAMPLES, EXAMPLES)
    assert statement["guarantee"].startswith("metric")


def test_contributing_tokens_of_private_texts_are_counted_once(world, service, tmp_path):
    folder = tmp_path / "c"
    start = ("split", "customer", "--insecure", "--address", service.address, "--folder", folder, "--eta", 9)
    start += ("--tokenizer", world / "model")
    start = (*start, "--cti", "prior", "--batch-size", 8)
    data = ("--train", world / "train.csv", "--epochs", 1)
    assert "counts of the private texts reveal them" in refused(*start, *data)
    assert "leave out --noise rows" in refused(*start, *data, "--cti-noise", 1, "--noise", "rows")
    assert "counts the texts of --train" in refused(*start, "--cti-noise", 1, "--predict", world / "train.csv")
    result = run(*start, *data, "--cti-noise", 1)
    assert result.exit_code == 0, result.output
    kept = (folder / "counts.pt").read_bytes()
    statement = json.loads((folder / "statement.json").read_text())
    assert statement["guarantee"].startswith("metric")
    assert statement["also"][0]["epsilon"]["upper_bound"] == pytest.approx(
        accounting.epsilon(accounting.gaussian(1.0), 1e-5)
    )
    # Another draw would be another release, and another privatizer than the run was begun with.
    for more in (data, ("--predict", world / "train.csv")):
        result = run(*start, *more, "--cti-noise", 1)
        assert result.exit_code == 0, result.output
    assert (folder / "counts.pt").read_bytes() == kept
    assert "made with another --cti, --cti-noise or --cells" in refused(*start, *data, "--cti-noise", 2)
    public = (*start, *data, "--cti-public")
    assert "the private data itself" in refused(*public, world / "train.csv")
    head, *rows = (world / "train.csv").read_text().splitlines()
    (tmp_path / "public.csv").write_text("\n".join([head, *rows[::-1]]) + "\n")
    assert "are among the private ones" in refused(*public, tmp_path / "public.csv")
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


def test_certificates_command(tmp_path):
    result = run("split", "certificates", tmp_path / "c", "--customer", "alice", "--host", "vendor.example")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["alice", "authority", "vendor"]
    again = run("split", "certificates", tmp_path / "c", "--customer", "alice").output
    assert "has all of these already" in " ".join(again.split())
    assert "cannot name a customer" in refused("split", "certificates", tmp_path / "c", "--customer", "../x")


@pytest.mark.parametrize(
    ("program", "server", "client"), [("split", "vendor", "customer"), ("federated", "server", "node")]
)
def test_certificates_are_renewed_and_revoked(tmp_path, program, server, client):
    folder = tmp_path / "c"
    assert run(program, "certificates", folder, f"--{client}", "alice").exit_code == 0
    first = (folder / "alice" / "certificate.pem").read_bytes()
    assert run(program, "renew", folder, "--name", "alice", "--name", server).exit_code == 0
    second = (folder / "alice" / "certificate.pem").read_bytes()
    assert second != first
    assert run(program, "revoke", folder, "--name", "alice").exit_code == 0
    revoked = Revocations(folder / server)
    for certificate in (first, second):
        with pytest.raises(ValueError, match="revoked"):
            revoked.check(certificate)
    revoked.check((folder / server / "certificate.pem").read_bytes())
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
    assert "did not answer within 0.2 seconds" in refused(
        *(*customer, "--insecure", "--eta", 1, "--address", f"127.0.0.1:{free_port()}", "--patience", 0.2),
    )
