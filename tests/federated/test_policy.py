"""A client's own policy: floors that the run may only tighten, private paths from the node alone, nothing dropped in silence."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from fastdp.federated import FederatedConfig
from fastdp.federated.policy import NODE_FILE, NodePolicy, NodeSettingError, client_settings
from tests.cases import cases

NEEDED = {"model": "m", "output": "o", "eval": "e"}
OWN = {
    "train": "own.csv",
    "state": "kept",
    "model": str(Path(__file__).parent),
    "perturbation": "selective",
    "epsilon": 1.0,
}


def read(run=(), **node):
    """The settings that a node trains by; a value of None takes a key of OWN out."""
    given = {name.replace("_", "-"): value for name, value in (OWN | node).items() if value is not None}
    return client_settings(NEEDED | dict(run), given)


def test_a_run_may_be_stricter_than_a_node():
    run = {"perturbation": "all", "mechanism": "typed", "epsilon": 0.5, "budget": "text", "dpsgd-epsilon": 2.0}
    found = read(run, dpsgd_epsilon=3.0)
    assert (found.perturbation, found.mechanism, found.epsilon) == ("all", "typed", 0.5)
    assert (found.budget, found.dpsgd_epsilon) == ("text", 2.0)
    assert read({"mechanism": "paper"}, mechanism="partition", cells=8).mechanism == "local", "of the last release"


def test_a_mechanism_of_a_run_that_perturbs_nothing_does_not_matter():
    assert read({"perturbation": "none", "mechanism": "paper"}, mechanism="local").mechanism == "local"


settings_of_runs = st.fixed_dictionaries(
    {
        "perturbation": st.sampled_from(("none", "selective", "all")),
        "mechanism": st.sampled_from(("local", "typed", "partition", "paper")),
        "epsilon": st.floats(0.01, 1e9),
        "budget": st.sampled_from(("token", "text")),
        "threshold": st.floats(0, 1),
        "cells": st.integers(1, 10**6),
        "dpsgd-epsilon": st.floats(0, 1e9),
        "dpsgd-delta": st.floats(1e-12, 0.99),
        "train": st.just("/etc/passwd"),
        "eval": st.just("/etc/passwd"),
        "state": st.just("/tmp/elsewhere"),
        "names": st.just("/etc/passwd"),
        "labelled-spans": st.just("/etc/passwd"),
        "text-column": st.just("secret"),
        "detector": st.just("presidio"),
        "partition": st.sampled_from(("iid", "own")),
    }
)


@given(settings_of_runs, st.sampled_from(("selective", "all")), st.sampled_from(("local", "typed")))
def test_no_run_loosens_a_nodes_policy(run, perturbation, mechanism):
    """Whatever the server asks for: refused, or at least as strict in everything, and no path but the node's own."""
    found = read(run, perturbation=perturbation, mechanism=mechanism, epsilon=2.0, dpsgd_epsilon=3.0)
    order = ("none", "selective", "all")
    assert order.index(found.perturbation) >= order.index(perturbation)
    assert found.mechanism in {"local": ("local", "typed"), "typed": ("typed",)}[mechanism]
    assert found.epsilon <= 2.0
    assert found.threshold == 0.0
    assert 0 < found.dpsgd_epsilon <= 3.0
    assert found.dpsgd_delta <= 1e-5
    assert (found.train, found.eval, found.state, found.names, found.labelled_spans) == ("own.csv", "", "kept", "", "")
    assert found.text_column == "text"
    assert "rules" in found.detector.split(" + ")


def test_detectors_of_both_find_what_either_does():
    assert read({"detector": "presidio"}).detector == "rules + presidio"
    assert read({"detector": "rules"}).detector == "rules"
    assert read({"detector": "rules"}, detector="folder").detector == "folder + rules"


def test_a_run_brings_neither_a_tokenizer_nor_a_detector():
    """Both would read private texts before anything is perturbed, and tell of them what their maker wants to know."""
    assert read({"model": "/of/the/server"}).model == OWN["model"]
    for own in ({}, {"perturbation": "none", "epsilon": None}):
        with pytest.raises(ValueError, match="leave others out of the run"):
            read({"detector": "rules + /of/the/server"}, **own)
    assert read({"detector": "folder"}, detector="folder").detector == "folder"
    assert read({"perturbation": "all", "detector": "/of/the/server"}, perturbation="all").perturbation == "all"


def test_a_run_asks_for_no_more_work_than_a_node_allows():
    run = {"batch-size": 1 << 16, "physical-batch-size": 1 << 16}
    assert read(run).physical_batch_size == 16
    assert read({"physical-batch-size": 4}).physical_batch_size == 4
    assert read(run, physical_batch_size=64).physical_batch_size == 64
    assert read({"threads": 1024}).threads <= (os.cpu_count() or 1)
    assert read({"threads": 1024}, threads=3).threads == 3
    for name, asked, allowed in (
        ("rounds", 1 << 16, 1000),
        ("local_epochs", 1024, 64),
        ("max_length", 1 << 20, 1024),
        ("bottleneck_size", 4096, 512),
        ("lora_r", 4096, 512),
    ):
        with pytest.raises(ValueError, match=f"takes {name} up to {allowed}: lower it"):
            read({name: asked})
        assert getattr(read({name: asked}, **{name: asked}), name) == asked


def test_private_paths_come_from_the_node_alone():
    with pytest.raises(NodeSettingError, match="train is missing"):
        read({"train": "/etc/passwd"}, train=None)
    with pytest.raises(NodeSettingError, match="state is missing"):
        read({"state": "/tmp/elsewhere"}, state=None)
    assert read({"eval": "own.csv"}).eval == ""


@cases(
    ("node", "message"),
    [
        ({"epsilom": 1.0}, "no setting 'epsilom'; did you mean epsilon"),
        ({"learning_rate": 0.1}, "learning_rate is the run's to set"),
        ({"eval": "held.csv"}, "eval is the run's to set"),
        ({"perturbation": None}, "perturbation is missing"),
        ({"model": None}, "model is missing"),
        ({"model": "somebody/model"}, "model is 'somebody/model': name a folder"),
        ({"epsilon": None}, "epsilon is missing"),
        ({"perturbation": "none"}, "epsilon has no effect"),
        ({"perturbation": "none", "epsilon": None, "mechanism": "local"}, "mechanism has no effect"),
        ({"perturbation": "all", "detector": "rules"}, "detector has no effect"),
        ({"cells": 8}, "cells is the run's to set"),
        ({"dpsgd_delta": 1e-6}, "dpsgd_delta has no effect"),
        ({"detector": "presidio", "names": "names.txt"}, "names has no effect"),
        ({"mechanism": "paper"}, "mechanism is 'paper'"),
        ({"perturbation": "some"}, "perturbation is 'some'"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": "one"}, "epsilon must be a number"),
        ({"epsilon": float("inf")}, "epsilon is inf"),
        ({"num_partitions": 2}, "num_partitions marks a client of a simulation"),
        ({"partition_id": -1}, "partition_id is -1"),
    ],
)
def test_refused(node, message):
    with pytest.raises(NodeSettingError, match=message):
        read(**node)


def test_a_simulated_client_has_the_runs_settings():
    run = NEEDED | {"train": "all.csv", "perturbation": "none"}
    found = client_settings(run, {"partition-id": 1, "num-partitions": 2})
    assert found == FederatedConfig.read(run)


def test_every_setting_that_could_weaken_a_client_is_decided():
    """A new setting of a run has to be put somewhere: a floor, the node's alone, or harmless to what a client keeps."""
    harmless = {
        *("model", "output", "rounds", "fraction", "min_clients", "wait_seconds", "round_seconds", "aggregation"),
        *("evaluation", "max_update_norm", "max_examples", "resume", "peft", "bottleneck_size", "lora_r", "lora_alpha"),
        *(
            "local_epochs",
            "batch_size",
            "physical_batch_size",
            "learning_rate",
            "max_length",
            "eval_batch_size",
            "seed",
        ),
        *("threads", "device", "partition", "radius", "alpha", "client_clip"),
        *("client_noise_multiplier", "client_delta", "dpsgd_max_grad_norm"),
        # What is drawn after a type was answered, and whether draws are learned, tell nothing more of a token.
        *("replacement", "learn_replaced", "eval", "cells"),
    }
    decided = {field.name for field in dataclasses.fields(NodePolicy)} | harmless
    assert {field.name for field in dataclasses.fields(FederatedConfig)} <= decided


flwr = pytest.importorskip("flwr", reason="flwr is the optional extra 'federated', for Python 3.11 or later")


@pytest.fixture
def node(world, tmp_path):
    return {
        "train": str(world / "train.jsonl"),
        "state": str(tmp_path / "state"),
        "model": str(world / "model"),
        "perturbation": "all",
        "epsilon": 1.0,
        "partition-id": 0,
    }


def rounds(settings, node, run=()):
    """The rows of a server's run with one deployed client, which was told of a run with further settings."""
    from tests.federated.grid import LocalGrid, client, honest, reporting, run as run_server

    client.forget()
    grid = LocalGrid({100: reporting(honest(settings | dict(run), node))})
    return run_server(settings | {"min_clients": 1}, grid)[1]


def test_a_deployed_client_perturbs_though_the_server_says_none(settings, node, tmp_path):
    rows = rounds(settings | {"perturbation": "none", "partition": "iid"}, node)
    card = json.loads((tmp_path / "state" / "client-0" / "card.json").read_text())
    assert card["settings"]["epsilon"] == 1.0
    assert card["tokens"]["private"] == card["tokens"]["all"]
    assert [row["accepted"] for row in rows] == [1, 1]


def test_a_client_takes_no_order_beyond_its_rounds(settings, node):
    first, second = rounds(settings | {"rounds": 2}, node, {"rounds": 1})
    assert (first["accepted"], second["accepted"]) == (1, 0)
    assert "is no round of it" in second["refused"][0]["reason"]


def test_a_deployed_client_reads_its_own_file_alone(settings, node, tmp_path, monkeypatch):
    """Any user of a node's machine can take a task from Flower, and leave another context, or none, for the next."""
    own = tmp_path / "node.toml"
    own.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in node.items()))
    monkeypatch.setenv(NODE_FILE, str(own))
    settings = settings | {"rounds": 1, "perturbation": "none"}
    handed = ({}, {"num-partitions": 1}, node | {"perturbation": "none", "state": str(tmp_path / "theirs")})
    for number, each in enumerate(handed):
        (row,) = rounds(settings | {"output": str(tmp_path / f"out-{number}")}, each)
        assert row["accepted"] == 1
        card = json.loads((tmp_path / "state" / "client-0" / "card.json").read_text())
        assert card["tokens"]["private"] == card["tokens"]["all"]
    assert not (tmp_path / "theirs").exists()


def test_a_refused_client_trains_nothing_and_says_no_more_than_it_may(settings, node, tmp_path, caplog):
    """A floor is told to the server; a mistake in the node's own settings is told to its own log alone."""
    row, *_ = rounds(settings, node, {"detector": "some/model", "perturbation": "selective"})
    assert "rules and presidio" in row["refused"][0]["reason"]
    assert not (tmp_path / "state").exists()
    row, *_ = rounds(settings | {"output": str(tmp_path / "other")}, node | {"secret-codename": "x"})
    assert "secret" not in row["refused"][0]["reason"]
    assert "secret_codename" in caplog.text


def test_texts_drawn_for_one_run_are_not_drawn_anew_for_another(settings, node, tmp_path, monkeypatch, caplog):
    """Another state folder does not make it the first draw: refused, or said on the card that both took place."""
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "account"))
    monkeypatch.delenv("FASTDP_AGAIN", raising=False)
    (row,) = rounds(settings | {"rounds": 1}, node)
    assert row["accepted"] == 1
    moved = node | {"state": str(tmp_path / "elsewhere")}
    again = settings | {"rounds": 1, "output": str(tmp_path / "other")}
    (row,) = rounds(again, moved)
    assert row["accepted"] == 0
    assert "released before" in caplog.text
    assert not (tmp_path / "elsewhere" / "client-0" / "card.json").exists()
    monkeypatch.setenv("FASTDP_AGAIN", "1")
    (row,) = rounds(again | {"output": str(tmp_path / "third")}, moved)
    assert row["accepted"] == 1
    card = json.loads((tmp_path / "elsewhere" / "client-0" / "card.json").read_text())
    assert len(card["earlier_releases"]) == 1
