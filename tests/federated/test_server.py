"""The server against clients in this process: honest ones, broken and hostile ones, absent ones; resume and central DP."""

import copy
import json
import logging
import math
import threading
import traceback
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save_file

pytest.importorskip("flwr", reason="flwr is the optional extra 'federated', for Python 3.11 or later")

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

from fastdp.accounting import Card, Ledger, dpsgd, verify
from fastdp.federated import FederatedConfig, aggregation, client as client_app, server
from fastdp.federated.policy import ClientRefusal
from fastdp.federated.server import Server
from fastdp.federated.wire import pack_adapter, unpack_adapter
from tests.cases import cases

from .conftest import small
from .grid import LocalGrid, failing, federation, replaying, rows_of, run, tampering


def one_round(settings, grid, **changes):
    """The row of a run of one round, which nobody evaluates unless told to."""
    (row,) = run(settings | {"rounds": 1, "evaluation": "none"} | changes, grid)[1]
    return row


def test_a_run_lowers_perplexity_and_leaves_what_it_says(settings, tmp_path):
    _, rows = run(settings, federation(settings, 3))
    assert [row["accepted"] for row in rows] == [3, 3]
    assert rows[1]["perplexity"] < rows[0]["perplexity"]
    output = Path(settings["output"])
    for name in ("adapter", "run_card.json", "run_card.md", "server.safetensors"):
        assert (output / name).exists(), name
    assert "clients train on their texts as they are" in (output / "run_card.md").read_text()
    # The card is of these weights.
    assert verify(output / "run_card.json", weights=output / "adapter")
    altered = {name: tensor + 1 for name, tensor in load_file(output / "adapter" / "adapter_model.safetensors").items()}
    save_file(altered, tmp_path / "altered.safetensors")
    assert not verify(output / "run_card.json", weights=tmp_path / "altered.safetensors")
    readable = {path.name for path in output.iterdir() if path.stat().st_mode & 0o077}
    assert readable == {"adapter", "run_card.json", "run_card.md"}
    assert not [path for path in (output, *output.glob("clients/*")) if path.stat().st_mode & 0o077]
    public = [*output.glob("run_card.*"), *(output / "adapter").iterdir()]
    assert not [path for path in public if str(Path(settings["model"]).parent).encode() in path.read_bytes()]


def test_the_mean_of_two_rounds_is_equation_7(settings):
    """The server's adapter is the mean of what its clients returned, to float32."""
    seen = []

    def remember(reply):
        from fastdp.federated.messages import read_update

        seen.append(read_update(reply.content)[0])

    grid = federation(settings, 2)
    grid.clients = {node: tampering(answer, remember) for node, answer in grid.clients.items()}
    server, _ = run(settings | {"rounds": 1}, grid)
    returned = [unpack_adapter(data, server.adapted.adapter) for data in seen]
    for name, tensor in server.adapted.adapter.items():
        expected = (returned[0][name].double() + returned[1][name].double()) / 2
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-6)


def put(name, value):
    def change(reply):
        reply.content.metric_records["metrics"][name] = value

    return change


def with_bytes(make):
    def change(reply):
        record = reply.content.array_records["arrays"]
        data = make(record["adapter"].data)
        record["adapter"] = Array("uint8", (len(data),), record["adapter"].stype, data)

    return change


def with_name(name):
    """The first tensor under another name."""

    def renamed(data):
        (_, first), *rest = load(data).items()
        return pack_adapter(dict([(name, first), *rest]))

    return with_bytes(renamed)


def last_number(value):
    return with_bytes(lambda data: data[:-4] + torch.tensor([value], dtype=torch.float32).numpy().tobytes())


def stored_as(name):
    def change(reply):
        record = reply.content.array_records["arrays"]
        record["adapter"] = Array("uint8", record["adapter"].shape, name, record["adapter"].data)

    return change


WRONG_KINDS = {
    "arrays": ArrayRecord(),
    "metrics": MetricRecord({"num-examples": 1}),
}


#: What a client changes of an honest reply; `test_aggregation.py` has every way in which an update itself is refused.
CHANGES = {
    "'stolen' that the adapter lacks": with_name("stolen"),
    "no safetensors file": with_bytes(lambda data: b"[" * len(data)),
    "bytes, for an adapter": with_bytes(lambda data: data[:100]),
    "NaN or an infinity": last_number(math.nan),
    "number of examples is 0": put("num-examples", 0),
    "stored as 'pickle'": stored_as("pickle"),
}
#: Other replies.
ANSWERS = [
    ("it is no update", replaying(RecordDict({"metrics": MetricRecord({"x": 1})}))),
    ("it is no update", replaying(RecordDict(WRONG_KINDS))),
    ("out of battery", failing),
]


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """Replies of three clients to the first round's order, and settings under which they stay valid."""
    settings = small(world, tmp_path_factory.mktemp("trained")) | {"rounds": 1, "evaluation": "none"}
    contents = []
    grid = federation(settings, 3)
    keep = lambda reply: contents.append(copy.deepcopy(reply.content))  # noqa: E731
    grid.clients = {node: tampering(answer, keep) for node, answer in grid.clients.items()}
    run(settings, grid)
    return contents


@pytest.fixture(scope="module")
def of_two(world, trained, tmp_path_factory):
    """The global adapter after a round of the first two of them."""
    settings = small(world, tmp_path_factory.mktemp("two")) | {"rounds": 1, "evaluation": "none"}
    return run(settings, LocalGrid({100 + i: replaying(content) for i, content in enumerate(trained[:2])}))[0].adapted


def test_hostile_updates_are_refused_and_change_nothing(settings, trained, of_two):
    """The global adapter is to the bit the one of a round without hostile clients; the round goes on, and each is reported."""
    changed = [(words, tampering(replaying(trained[2]), change)) for words, change in CHANGES.items()]
    hostile = dict(enumerate([*changed, *ANSWERS], 200))
    two = {100 + index: replaying(content) for index, content in enumerate(trained[:2])}
    settings = settings | {"rounds": 1, "evaluation": "none"}
    server, (row,) = run(settings, LocalGrid({node: answer for node, (_, answer) in hostile.items()} | two))
    assert row["accepted"] == 2
    reasons = {int(refusal["client"]): refusal["reason"] for refusal in row["refused"]}
    assert reasons.keys() == hostile.keys()
    for node, (words, _) in hostile.items():
        assert words in reasons[node]
    for name, tensor in server.adapted.adapter.items():
        torch.testing.assert_close(tensor, of_two.adapter[name], atol=1e-8, rtol=0)


def test_a_failure_that_nobody_foresaw_refuses_one_update(settings, trained, monkeypatch):
    """Whatever breaks while a client's update is read, the round goes on with the others."""
    original, asked = server.read_update, []

    def breaking(record):
        asked.append(record)
        if len(asked) == 1:
            raise RecursionError("too deep")
        return original(record)

    monkeypatch.setattr(server, "read_update", breaking)
    row = one_round(settings, LocalGrid({100 + index: replaying(content) for index, content in enumerate(trained)}))
    assert row["accepted"] == 2
    assert row["refused"][0]["reason"] == "it is no update: RecursionError"


def test_a_reply_that_flower_cannot_read_or_never_gets_takes_no_other_with_it(settings, trained, monkeypatch):
    """Flower reads a client's objects while the server fetches them, and waits for those that are missing."""
    monkeypatch.setattr(server, "PULL_SECONDS", 0.2)
    ended = threading.Event()

    def broken(message):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    def mute(message):
        ended.wait(60)

    clients = [mute, broken, replaying(trained[0]), mute, replaying(trained[1])]
    row = one_round(settings, LocalGrid(dict(enumerate(clients))), round_seconds=3.0)
    ended.set()
    assert (row["accepted"], row["missing"]) == (2, 2)
    assert row["refused"][0]["client"] == "1"
    assert "it cannot be read: UnicodeDecodeError(" in row["refused"][0]["reason"]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0])
def test_metrics_that_no_client_can_measure_are_ignored(settings, trained, value):
    """Two losses of 1e308 have no finite sum; no row could be written of them."""
    wrong = [tampering(replaying(content), put("loss", value)) for content in trained[:2]]
    wrong = [tampering(answer, put("seconds", value)) for answer in wrong]
    row = one_round(settings, LocalGrid(dict(enumerate([*wrong, replaying(trained[2])]))))
    metrics = trained[2].metric_records["metrics"]
    assert row["accepted"] == 3
    assert (row["unprotected"]["loss"], row["client_seconds"]) == (metrics["loss"], metrics["seconds"])


def test_one_client_of_four_does_not_set_what_clients_report(settings, trained):
    """Whatever it claims, each figure stays within those of the three honest ones."""
    wrong = tampering(tampering(replaying(trained[0]), put("loss", 700.0)), put("seconds", 3000.0))
    row = one_round(settings, LocalGrid(dict(enumerate([wrong, *map(replaying, trained)]))))
    metrics = [content.metric_records["metrics"] for content in trained]
    assert row["unprotected"]["loss"] <= max(found["loss"] for found in metrics)
    assert row["client_seconds"] <= 4 * max(found["seconds"] for found in metrics)


def test_what_a_client_says_is_one_plain_line_of_the_log(settings, trained, caplog):
    forged = "\x1b[2J\r\nINFO : round 9: 4 of 4 accepted, perplexity 1.00\u2028\u202e\x9b2J"
    hostile = (
        lambda message: failing(message, forged * 50),
        tampering(replaying(trained[0]), with_name(forged)),
        tampering(replaying(trained[0]), stored_as(forged)),
        tampering(replaying(trained[0]), with_bytes(lambda data: (forged.encode() * len(data))[: len(data)])),
    )
    grid = LocalGrid(dict(enumerate([*map(replaying, trained[:2]), *hostile])))
    with caplog.at_level(logging.INFO, "flwr"):
        row = one_round(settings, grid)
    said = [record.getMessage() for record in caplog.records] + [refusal["reason"] for refusal in row["refused"]]
    assert len(row["refused"]) == 4
    for line in said:
        assert len(line.splitlines()) == 1
        assert line.isprintable(), line
        assert len(line) < 400


def test_a_client_that_stays_away_is_not_waited_for_for_ever(settings, trained):
    grid = LocalGrid({1: lambda message: None, 2: replaying(trained[0]), 3: replaying(trained[1])})
    row = one_round(settings, grid, round_seconds=1.0)
    assert (row["accepted"], row["missing"]) == (2, 1)


def test_too_few_updates_change_nothing(settings, trained):
    settings = settings | {"rounds": 1}
    grid = LocalGrid({1: failing, 2: replaying(trained[0])})
    server = Server(grid, FederatedConfig.read(settings))
    before = server.adapted.adapter
    server.run()
    assert rows_of(settings)[0]["void"]
    assert all(torch.equal(before[name], tensor) for name, tensor in server.adapted.adapter.items())


def test_too_few_clients(settings):
    with pytest.raises(ValueError, match="1 clients are connected after 0.3 s, but a round needs 2"):
        run(settings, federation(settings, 1))


def _key_error():
    raise KeyError("Anna's diagnosis")


def _value_error():
    return float("Anna's diagnosis")


def _of_json():
    return json.loads("Anna's diagnosis")


def _of_bytes():
    return b"Anna's diagnosis \xff".decode("utf-8")


def _chained():
    try:
        _value_error()
    except ValueError:
        raise ClientRefusal("it cannot take part") from None


@cases("fault", [_key_error, _value_error, _of_json, _of_bytes, _chained])
def test_what_a_client_raises_quotes_nothing_in_its_chain(fault):
    """Flower's simulation sends the text of an error and of all that it says it was caused by."""
    with pytest.raises((RuntimeError, ClientRefusal)) as raised:
        client_app.hide_private_errors(lambda message, context: fault())(None, None)
    told = "".join(traceback.format_exception_only(raised.value))
    assert "diagnosis" not in told
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


def test_another_base_model_is_noticed_by_the_client(settings, world):
    settings = settings | {"rounds": 1, "evaluation": "none"}
    grid = federation(settings, 2)
    server = Server(grid, FederatedConfig.read(settings))
    server.adapted.base = "0" * 64
    server.run()
    for refusal in server.rows[0]["refused"]:
        assert "the server's base model is not this client's" in refusal["reason"]
    assert len(server.rows[0]["refused"]) == 2


def test_memory_does_not_grow_with_clients(settings, trained):
    """Few replies are alive at a time, of 24."""
    grid = LocalGrid(dict.fromkeys(range(24), replaying(trained[0])))
    assert one_round(settings, grid)["accepted"] == 24
    assert grid.alive <= 5


def test_sampling_of_clients(settings, trained):
    grid = LocalGrid(dict.fromkeys(range(6), replaying(trained[0])))
    one_round(settings, grid, fraction=0.5)
    assert len(grid.sent) == len({node for node, _ in grid.sent}) == 3


class Stopped(Exception):
    pass


def test_resume_continues_with_the_adapter_and_the_rounds(settings, trained):
    grid = LocalGrid(dict.fromkeys(range(2), replaying(trained[0])))
    server = Server(grid, FederatedConfig.read(settings | {"rounds": 3}))
    push = grid.push_messages

    def stop_in_the_third(messages):
        if len(grid.sent) == 4:
            raise Stopped
        return push(messages)

    grid.push_messages = stop_in_the_third
    with pytest.raises(Stopped):
        server.run()
    grid.push_messages = push
    kept = server.adapted.adapter
    with pytest.raises(ValueError, match="already holds a run: set resume"):
        Server(grid, FederatedConfig.read(settings | {"rounds": 3}))
    resumed = Server(grid, FederatedConfig.read(settings | {"rounds": 3, "resume": True}))
    assert all(torch.equal(kept[name], tensor) for name, tensor in resumed.adapted.adapter.items())
    resumed.run()
    assert [row["round"] for row in rows_of(settings)] == [1, 2, 3]


def test_an_output_has_one_server(settings):
    first = Server(LocalGrid({}), FederatedConfig.read(settings))
    with pytest.raises(ValueError, match="in use by another program"):
        Server(LocalGrid({}), FederatedConfig.read(settings))
    del first
    Server(LocalGrid({}), FederatedConfig.read(settings))


def test_resume_with_another_config_is_refused(settings, trained):
    run(settings | {"rounds": 1}, LocalGrid(dict.fromkeys(range(2), replaying(trained[0]))))
    with pytest.raises(ValueError, match="made with learning_rate 0.005, not 0.1"):
        Server(LocalGrid({}), FederatedConfig.read(settings | {"learning_rate": 0.1, "resume": True}))
    (Path(settings["output"]) / "server.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        Server(LocalGrid({}), FederatedConfig.read(settings | {"resume": True}))


CENTRAL = {
    "client_clip": 0.5,
    "client_noise_multiplier": 1.0,
    "fraction": 0.5,
    "evaluation": "none",
    "client_delta": 1e-3,
}


def test_central_dp_is_certified(settings, trained):
    """The card's event is the rounds' Poisson-sampled Gaussian; the clients are the units."""
    settings = settings | CENTRAL | {"rounds": 3}
    run(settings, LocalGrid(dict.fromkeys(range(4), replaying(trained[0]))))
    card = Card.load(Path(settings["output"]) / "card.json")
    assert card["unit"] == "client"
    assert card["sample_rate"] == 0.5
    assert card["steps"] == {"planned": 3, "spent": 3}
    assert card["guarantee"] == "differential privacy"
    assert card.claims[0].event == dpsgd(1.0, 0.5, 3)
    assert any("4 updates is rounded to float32 before its noise" in entry for entry in card["remaining"])


def test_central_dp_publishes_nothing_of_who_took_part(settings, trained):
    """Its epsilon counts on the sample being secret: no card holds a client's number or how many answered."""
    settings = settings | CENTRAL | {"rounds": 1, "fraction": 1.0, "round_seconds": 1.0}
    grid = LocalGrid({7770001: replaying(trained[0]), 7770002: failing, 7770003: lambda message: None})
    row = one_round(settings, grid)
    assert (row["accepted"], row["missing"], row["refused"][0]["client"]) == (1, 1, "7770002")
    output = Path(settings["output"])
    run_card, card = Card.load(output / "run_card.json"), Card.load(output / "card.json")
    assert run_card["updates"] is None
    assert "not stated: who was sampled is secret" in run_card.to_markdown()
    for name in ("run_card.json", "run_card.md", "card.json", "card.md"):
        assert "777000" not in (output / name).read_text(), name
    for found in (run_card, card):
        assert any(entry.startswith("rounds.jsonl") for entry in found["unprotected"])
    assert any(entry.startswith("training loss and other metrics") for entry in card["unprotected"])


@pytest.mark.parametrize(("delta", "warned"), [(0.25, True), (0.2, False)])
def test_central_dp_with_a_delta_that_promises_nothing(settings, trained, caplog, delta, warned):
    with caplog.at_level(logging.WARNING, "flwr"):
        one_round(
            settings | CENTRAL | {"client_delta": delta}, LocalGrid(dict.fromkeys(range(4), replaying(trained[0])))
        )
    assert ("is not below 1/clients = 0.25" in caplog.text) == warned


def test_central_dp_releases_whoever_takes_part(settings):
    """With no accepted update at all the round is noise, and paid for."""
    settings = settings | CENTRAL | {"rounds": 1}
    grid = LocalGrid(dict.fromkeys(range(3), failing))
    server = Server(grid, FederatedConfig.read(settings))
    before = server.adapted.adapter
    server.run()
    assert not rows_of(settings)[0]["void"]
    assert all(not torch.equal(before[name], tensor) for name, tensor in server.adapted.adapter.items())


def test_central_dp_killed_after_its_release_forgets_nothing(settings, trained, monkeypatch):
    """A crash between release and checkpoint: the release stays counted, and the resumed run ends a round early."""
    settings = settings | CENTRAL | {"rounds": 2}
    grid = LocalGrid(dict.fromkeys(range(3), replaying(trained[0])))
    server = Server(grid, FederatedConfig.read(settings))
    noisy = aggregation.Aggregator.noisy_mean

    def crash(*arguments):
        noisy(*arguments)
        raise Stopped

    monkeypatch.setattr(aggregation.Aggregator, "noisy_mean", crash)
    with pytest.raises(Stopped):
        server.run()
    monkeypatch.undo()
    resumed = Server(grid, FederatedConfig.read(settings | {"resume": True}))
    resumed.run()
    assert len(resumed.rows) == 1
    ledger = Ledger.read(Path(settings["output"]) / "ledger.jsonl")
    assert ledger.spent_steps == 2


def test_central_dp_with_another_noise_or_a_lost_ledger(settings, trained):
    settings = settings | CENTRAL | {"rounds": 1}
    run(settings, LocalGrid(dict.fromkeys(range(3), replaying(trained[0]))))
    ledger = Path(settings["output"]) / "ledger.jsonl"
    kept = ledger.read_bytes()
    ledger.unlink()
    with pytest.raises(ValueError, match="is gone, and releases were recorded in it"):
        Server(LocalGrid({}), FederatedConfig.read(settings | {"resume": True}))
    ledger.write_bytes(kept)
    (Path(settings["output"]) / "server.safetensors").unlink()
    with pytest.raises(ValueError, match="already holds a run's ledger"):
        Server(LocalGrid({}), FederatedConfig.read(settings))
    with pytest.raises(ValueError, match="another noise or sampling"):
        Server(LocalGrid({}), FederatedConfig.read(settings | {"resume": True, "client_noise_multiplier": 2.0}))
