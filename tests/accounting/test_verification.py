"""What `verify` compares, field by field: a card against itself, its weights, and the ledger of its run."""

import copy
import json
import time

import pytest
import torch
from safetensors.torch import save_file

from fastdp import accounting
from fastdp.accounting import EventModel, Gaussian, Ledger, verify
from fastdp.accounting.events import ChosenDpEvent
from tests.accounting.test_claim import CLAIMS, HEADER, card, resealed, run, run_card  # noqa: F401
from tests.cases import cases


def changed(body, path, value):
    """A copy of a card with another value at a path."""
    body = copy.deepcopy(dict(body))
    place = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return body


def json_of(made):
    """The card as its file holds it."""
    return json.loads(made.to_json())


RESEALED = [
    (("epsilon", "delta"), 1e-12, "costs"),
    (("epsilon", "delta"), 0.5, "delta"),
    (("steps", "spent"), 9, "states 9 steps"),
    (("noise_multiplier",), 0.5, "its event holds 0"),
    (("noise_multiplier",), 2.0, "its event holds 0"),
    (("sample_rate",), 0.04, "its event holds 0"),
    (("sample_rate",), 0.01, "its event holds 0"),
    (("dataset_size",), 3, "number of units, 3,"),
    (("guarantee",), "pure differential privacy", "its claim is"),
    (("format",), "another", "format"),
    (("version",), 99, "schema version"),
    (("mechanism",), "DP-SGD", "mechanism"),
    (("mechanism",), {}, "mechanism has no name"),
    (("weights",), [None], "weights are no digests"),
    (("weights",), "none", "weights is missing or of the wrong type"),
    (("unit",), "", "unit is missing"),
    (("event",), None, "event"),
    (("model", "fingerprint"), "other", "another model"),
    (("unit",), "user", "states unit 'user'"),
    (("dataset_size",), 50_000, "number of units, 50000,"),
    (("sampling",), "shuffled", "no amplification"),
    (("mechanism",), {"name": "Rap-FT"}, "another mechanism"),
    (("run_id",), "another", "another run"),
    (("ledger_head",), "0" * 64, "cut back or replaced"),
    (("ledger_head",), None, "does not say at which record"),
    (("epsilon", "accountant"), "rdp", "the accountant of its event is pld"),
    (("epsilon", "grid"), 0.5, "the grid of its event"),
    (("epsilon", "target"), 0.5, "below the claimed epsilon"),
    (("membership",), {}, "states the true-positive rate None"),
    (("membership", "0.01"), 1.013, "states the true-positive rate 1.013"),
    (("noise_source", "secure_rounding"), True, "assumes what"),
    (("noise_source", "secure_rounding"), None, "says nothing of secure_rounding"),
    (("noise_source", "generator"), "MT19937", "no generator"),
    (("noise_source", "key"), "a secret", "no generator and key"),
    (("assumptions",), [], "assumptions lack"),
    (("unprotected",), [], "unprotected lack"),
    (("sample_rate",), None, "sample_rate is missing"),
    (("steps",), {"spent": 8}, "planned steps are no count"),
    (("steps", "planned"), 500, "the ledger counts"),
    (("steps", "spent"), 1, "the ledger counts"),
    (("model", "trained_parameters"), -1, "a count of parameters"),
    (("model", "name"), None, "another model|lacks a name"),
]


def test_a_run_keeps_the_fields_of_one(run):  # noqa: F811
    made, _ = run
    for name in ("steps", "sampling", "noise_multiplier", "model"):
        body = {key: value for key, value in json_of(made).items() if key != name}
        assert "malformed" in verify(resealed(body)).reason


@cases(("path", "value", "match"), RESEALED)
def test_what_matters_is_found_whoever_renews_the_digest(run, path, value, match):  # noqa: F811
    made, ledger = run
    result = verify(resealed(changed(json_of(made), path, value)), ledger=ledger)
    assert not result
    assert any(word in result.reason for word in match.split("|")), result.reason


@pytest.mark.parametrize(
    "event",
    [
        accounting.gaussian(0.0),
        accounting.gaussian(5.0),
        accounting.dpsgd(3.0, 0.02, 1),
        accounting.chosen([accounting.gaussian(4.0)], 1.0, 0.1),
    ],
    ids=["without noise", "Gaussian", "sampled", "chosen"],
)
def test_a_release_of_another_kind_that_the_card_leaves_out_is_found(tmp_path, event):
    """The card's steps are all there, and its epsilon is theirs: the ledger counts one release more."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, HEADER, event=accounting.dpsgd_model(1.0, 0.02), budget_steps=20, block=3)
    ledger.declare("other", EventModel(event), 1)
    for kind in ["step"] * 8 + ["other"]:
        ledger.record(kind)
    # The figure of a choice takes seconds, and tests/finetune/test_tune.py verifies a whole card of one.
    whole = None if isinstance(event, ChosenDpEvent) else run_card(ledger)
    made = run_card(ledger, event=accounting.dpsgd(1.0, 0.02, 8))
    ledger.close()
    assert verify(made).holds
    result = verify(made, ledger=path)
    assert not result
    assert "counts releases that the card's event does not hold" in result.reason
    assert whole is None or verify(whole, ledger=path).holds


def test_a_card_may_speak_of_some_of_the_tensors_in_a_file(tmp_path):
    trained, frozen = torch.arange(6.0).reshape(2, 3), torch.ones(4)
    made = card(CLAIMS["gaussian"], weights=[trained], facts={"model": {}})
    save_file({"trained": trained, "frozen": frozen}, tmp_path / "w.safetensors")
    assert verify(made, weights=tmp_path).holds
    save_file({"frozen": frozen}, tmp_path / "w.safetensors")
    assert "1 of the 1 tensors" in verify(made, weights=tmp_path).reason


def edit_config(adapter):
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 32}')


def add_file(adapter):
    save_file({"more": torch.ones(2)}, adapter / "more.safetensors")


def remove_config(adapter):
    (adapter / "adapter_config.json").unlink()


def swap_tensors(adapter):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit_config, "adapter_config.json was changed"),
        (add_file, "more.safetensors is no file of it"),
        (remove_config, "adapter_config.json is not there"),
        (swap_tensors, "adapter_model.safetensors was changed"),
    ],
)
def test_the_files_beside_the_weights_are_bound(tmp_path, change, words):
    adapter, weights = tmp_path / "adapter", {"a": torch.zeros(2), "b": torch.ones(2)}
    adapter.mkdir()
    save_file(weights, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"lora_alpha": 16}')
    plain = card(CLAIMS["gaussian"], weights=weights.values(), facts={"model": {"name": "gpt2"}})
    assert any("adapter's config" in said for said in verify(plain, weights=tmp_path).unchecked)
    plain.save_beside(adapter)
    made = plain.of_files(adapter)
    for folder in (tmp_path, adapter):
        assert verify(made, weights=folder).guarantee
        assert verify(adapter / "README.md", weights=folder).guarantee
    change(adapter)
    for folder in (tmp_path, adapter):
        assert words in verify(made, weights=folder).reason


def test_a_gaussian_claim_of_no_noise_is_void():
    made = card(Gaussian("text", "add_remove", accounting.gaussian(0.0), 1e-5))
    assert made["guarantee"] == "none"
    assert not verify(resealed(changed(made, ("guarantee",), "differential privacy")))


KINDS = [accounting.dpsgd(4 + i / 1200, 0.01, 1) for i in range(1200)]


MANY = {
    "losses far apart": accounting.dpsgd(0.5, 0.9, 10**9),
    "releases": accounting.compose(*KINDS),
    "in a trial": accounting.chosen([accounting.compose(*KINDS)], 1.0, 0.1),
    "trials": accounting.chosen(KINDS[:400], 1.0, 0.1),
    "choices": accounting.compose(*(accounting.chosen(KINDS[i::300][:3], 0.0, 0.9) for i in range(300))),
}


@cases("name", MANY)
def test_thousands_of_kinds_of_release_are_verified_in_seconds(name):
    """Each grew the window of the next, so that a hundred took half a minute, and a billion more memory than there is."""
    claim = Gaussian("example", "add_remove", MANY[name], 1e-5)
    made = card(claim)
    begin = time.process_time()
    assert verify(made).holds
    assert time.process_time() - begin < 25


def test_a_run_of_many_noise_levels_is_verified_in_seconds(tmp_path):
    factors = tuple((step, 1 + step / 3_000) for step in range(3_000))
    model = accounting.dpsgd_model(9.0, 0.02, factors=factors)
    ledger = Ledger.create(tmp_path / "ledger.jsonl", HEADER, event=model, budget_steps=3_000)
    ledger.record("step")
    made = run_card(ledger, event=model.event(3_000))
    ledger.close()
    schedule = {**made["mechanism"], "noise_schedule": [list(entry) for entry in factors]}
    made = resealed(
        {**made, "noise_multiplier": 9.0, "mechanism": schedule, "steps": {"planned": 3_000, "spent": 3_000}}
    )
    begin = time.process_time()
    assert verify(made).holds, verify(made).reason
    assert time.process_time() - begin < 25


def test_a_card_of_countless_claims_is_refused():
    claim = Gaussian("example", "add_remove", accounting.dpsgd(4.0, 0.01, 10), 1e-5)
    assert (
        "also is no list of at most 16 claims"
        in verify(resealed({**card(claim), "also": [claim.to_json()] * 17})).reason
    )
