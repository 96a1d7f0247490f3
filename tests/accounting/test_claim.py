"""Every kind of claim: what it costs, what a card says of it, and that whoever alters what matters is found."""

import copy
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file

from fastdp import accounting
from fastdp.accounting import Card, ExternalClaim, Gaussian, Ledger, Metric, Pure, noise_source, verify
from fastdp.accounting.card import digest
from fastdp.accounting.claim import two_decimals
from fastdp.accounting.weights import digests, digests_of
from tests.accounting.test_card import RATE, card_of_run
from tests.cases import cases

SECRET = noise_source(reproducible=False)
CLAIMS = {
    "gaussian": Gaussian("text", "add_remove", accounting.gaussian(2.0), 1e-5),
    "pure": Pure("each private token", 2.0, units=7, releases=2),
    "metric": Metric("one token", 16.0, releases=3, distance="distance of the tokens' rows"),
    "elsewhere": ExternalClaim("client", "each client as a whole", "card.json"),
}


def card(*claims, **options):
    first, *also = claims
    return Card.of(first, also=also, mechanism="a mechanism", noise_source=SECRET, **options)


def resealed(body):
    """The card of someone who alters it and knows how to renew its digest."""
    return {**body, "digest": digest(body)}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_of_any_kind_is_written_read_shown_and_verified(name, tmp_path):
    claim = CLAIMS[name]
    made = card(claim)
    path, shown = made.save(tmp_path / "card")
    assert Card.load(path).claims == [claim]
    result = verify(path)
    assert result.holds, result.reason
    assert result.guarantee == (name != "elsewhere"), "what another card certifies is not certified here"
    assert f"**{claim.headline(made)[0]}**" in shown.read_text()
    assert any("no signature" in entry for entry in result.unchecked)


def test_claims_add_up_on_one_card():
    made = card(CLAIMS["metric"], CLAIMS["gaussian"])
    assert made.claims == [CLAIMS["metric"], CLAIMS["gaussian"]]
    result = verify(made)
    assert result.holds
    assert "exp(48 *" in result.reason
    assert "covers the recomputed" in result.reason
    assert "**epsilon 48 per unit of distance of the tokens' rows**, or exp(48 *" in made.to_markdown()
    assert "**epsilon <=" in made.to_markdown()


@given(
    st.floats(1e-6, 1e6),
    st.one_of(st.none(), st.integers(0, 10_000)),
    st.integers(1, 1000),
    st.sampled_from([Pure, Metric]),
)
@settings(max_examples=40)
def test_bounds_of_units_and_releases_add_up_and_are_never_shown_too_small(nats, units, releases, kind):
    claim = kind("unit", nats, units, releases)
    made = card(claim)
    found = verify(made)
    assert found.holds
    if units is not None:
        assert found.recomputed == pytest.approx(units * releases * nats)
    shown = float(made["bound"].removeprefix("exp(").removeprefix("epsilon ").split(" ")[0])
    assert nats * releases * (1 - 1e-11) <= shown <= nats * releases * (1 + 2e-5)


@given(st.sampled_from(["of_a_unit", "units", "releases", "of_a_text"]), st.floats(0.01, 0.99), st.booleans())
@settings(max_examples=40)
def test_a_bound_that_does_not_follow_is_found_whoever_renews_the_digest(field, share, metric):
    claim = (Metric if metric else Pure)("unit", 2.0, 70, 50)
    body = copy.deepcopy(dict(card(claim)))
    value = body["budget"][field]
    body["budget"][field] = value * share if isinstance(value, float) else max(int(value * share), 1)
    assert not verify(body)
    changed = verify(resealed(body))
    # Fewer units or releases with the same totals claim no less than they cost; the words still give them away.
    if field in ("of_a_unit", "releases"):
        assert not changed
    if field == "of_a_text":
        assert not changed
        assert "add up to" in changed.reason


@cases(
    ("changed", "match"),
    [
        ({"bound": "exp(1 * distance)"}, "its figures give"),
        ({"guarantee": "differential privacy"}, "names its guarantee"),
        ({"kind": "pure"}, "names its guarantee"),
        ({"kind": "none"}, "holds no claim"),
        ({"kind": "laplace"}, "not a kind of claim"),
        ({"budget": {}}, "cannot be read"),
        (
            {"budget": {"of_a_unit": -1.0, "units": None, "releases": 1, "of_a_text": None}},
            "must be a finite number above 0",
        ),
        (
            {"budget": {"of_a_unit": True, "units": None, "releases": 1, "of_a_text": None}},
            "give a number",
        ),
        ({"budget": {"of_a_unit": 16.0, "units": None, "releases": 0, "of_a_text": None}}, "of at least 1"),
        ({"budget": {"of_a_unit": 16.0, "units": None, "releases": 3, "of_a_text": 0.1}}, "not how many units one has"),
        # A page shows them, and nothing of this kind of claim gives them.
        ({"membership": {"0.01": 0.0}}, "states membership, which no claim of its kind gives"),
        ({"epsilon": {"upper_bound": 0.1, "delta": 1e-9}}, "states epsilon, which no claim of its kind gives"),
        ({"also": 3}, "also is missing or of the wrong type"),
        ({"also": [3]}, "no list of at most 16 claims"),
        ({"also": [{"kind": "gaussian"}]}, "cannot be read"),
        ({"noise_source": {"key": "unsafe_reproducible"}}, "reproducible key"),
        ({"why_no_guarantee": ["so"]}, "reasons why there is none"),
    ],
)
def test_malformed_claims_are_refused_in_a_sentence(changed, match):
    refused_in_a_sentence({**card(CLAIMS["metric"]), **changed}, match)


@cases(
    ("changed", "match"),
    [
        ({"guarantee": "differential privacy", "noise_source": {"key": "unsafe_reproducible"}}, "reproducible key"),
        ({"event": {"format": "fastdp.event", "version": 1, "event": {"kind": "laplace"}}}, "laplace"),
        ({"event": {"format": "fastdp.event", "version": 7, "event": {"kind": "no_op"}}}, "version 7"),
        ({"steps": {"planned": 1, "spent": -1}}, "spent steps"),
        ({"remaining": None}, "remaining is missing"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"epsilon": {"upper_bound": "low", "delta": 1e-5}}, "not a number"),
        ({"epsilon": {"upper_bound": 1.0, "delta": 0.0}}, "delta"),
        ({"epsilon": {"upper_bound": 1.0, "delta": None}}, "states no epsilon"),
        ({"epsilon": 3}, "epsilon is missing or of the wrong type"),
        ({"unit": None}, "unit is missing or of the wrong type"),
        ({"membership": {"0.5": 0.0}}, "states a true-positive rate at '0.5'"),
        ({"membership": "low"}, "malformed"),
    ],
)
def test_malformed_runs_are_refused_in_a_sentence(run, changed, match):
    refused_in_a_sentence({**run[0], **changed}, match)


def refused_in_a_sentence(body, match):
    result = verify(resealed(body))
    assert not result
    assert match in result.reason
    assert "\n" not in result.reason


def test_a_claim_beside_the_first_is_worked_out_too():
    body = copy.deepcopy(dict(card(CLAIMS["metric"], CLAIMS["gaussian"])))
    body["also"][0]["epsilon"]["upper_bound"] /= 2
    result = verify(resealed(body))
    assert not result
    assert "its event costs" in result.reason


@pytest.mark.parametrize("delta", [0.5, 0.99])
def test_a_delta_of_whole_units_never_holds(delta):
    result = verify(card(Gaussian("text", "add_remove", accounting.gaussian(2.0), delta)))
    assert not result
    assert "not below 1/N" in result.reason
    small = verify(card(CLAIMS["gaussian"]))
    assert any("the card does not state" in entry for entry in small.unchecked)


def test_a_card_without_a_claim_says_why():
    with pytest.raises(ValueError, match="must say why"):
        Card.of(None, mechanism="m", noise_source=SECRET)
    made = Card.of(None, mechanism="m", noise_source=SECRET, flaws=["texts leave as they are"])
    result = verify(made)
    assert result.holds
    assert not result.guarantee
    assert "texts leave as they are" in result.reason


def test_a_fact_takes_no_claims_place():
    for name in ("budget", "digest", "guarantee"):
        with pytest.raises(ValueError, match="another name"):
            card(CLAIMS["pure"], facts={name: 1})
        with pytest.raises(ValueError, match="another name"):
            card(CLAIMS["pure"]).with_facts(**{name: 1})
    made = card(CLAIMS["pure"], facts={"texts": 3}).with_facts(texts=4, columns=["label"])
    assert verify(made)
    assert (made["texts"], made["columns"]) == (4, ["label"])


@pytest.mark.parametrize("at", ["top", "within"])
def test_a_key_that_stands_twice_is_refused(at):
    text = card(CLAIMS["pure"]).to_json()
    assert verify(text)
    name, value = ("unit", '"each private token"') if at == "top" else ("units", "7")
    doubled = text.replace(f'"{name}": {value}', f'"{name}": {value}, "{name}": {value}')
    assert json.loads(doubled) == json.loads(text)
    result = verify(doubled)
    assert not result
    assert f"'{name}' stands in it twice" in result.reason


def test_what_is_no_number_is_refused():
    text = card(CLAIMS["gaussian"]).to_json().replace('"delta": 1e-05', '"delta": NaN')
    assert "NaN" in verify(text).reason


# Weights and ledgers


def tensors():
    return {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.randn(4, dtype=torch.bfloat16),
        "c": torch.randn(3, 3).t(),
        "d": torch.tensor(1.5),
        "e": torch.empty(0, 2, dtype=torch.int8),
    }


def test_digests_are_of_content_and_form_whatever_the_name(tmp_path):
    given = tensors()
    save_file({f"renamed.{name}": t.contiguous() for name, t in given.items()}, tmp_path / "w.safetensors")
    assert digests_of(tmp_path).keys() == set(digests(given.values()))
    assert digests_of(tmp_path / "w.safetensors") == digests_of(tmp_path)
    for name, other in (
        ("a", given["a"].reshape(3, 2)),
        ("a", given["a"].double()),
        ("d", given["d"] + 1),
        ("a", given["a"].clone().fill_(math.nan)),
    ):
        assert not set(digests([other])) & digests_of(tmp_path).keys(), name


@cases("dtype, width", [("F4", 2), ("C64", 32), ("F8_E8M0", 4), ("U16", 8), ("F6_E2M3", 3)])
def test_tensors_of_any_dtype_have_a_digest_or_are_named(tmp_path_factory, dtype, width):
    path = tmp_path_factory.mktemp("dtypes") / "w.safetensors"
    header = json.dumps({"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, width]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(width))
    if dtype != "F6_E2M3":
        assert len(digests_of(path)) == 1
        return
    with pytest.raises(ValueError, match="w.safetensors .* tensor 'w' has no dtype of torch's: save it in one"):
        digests_of(path)


def test_weights_that_the_card_does_not_speak_of_are_found(tmp_path):
    given = tensors()
    made = card(CLAIMS["gaussian"], weights=given.values(), facts={"model": {}})
    assert any("which weights it speaks of" in entry for entry in verify(made).unchecked)
    save_file({name: t.contiguous() for name, t in given.items()}, tmp_path / "w.safetensors")
    result = verify(made, weights=tmp_path)
    assert result.holds
    assert not any("which weights" in entry for entry in result.unchecked)
    given["a"] = given["a"] + 1e-6
    save_file({name: t.contiguous() for name, t in given.items()}, tmp_path / "w.safetensors")
    result = verify(made, weights=tmp_path)
    assert not result
    assert "1 of the 5 tensors" in result.reason
    assert "no digest of weights" in verify(card(CLAIMS["gaussian"]), weights=tmp_path).reason
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 20)
    assert "no safetensors file" in verify(made, weights=tmp_path).reason
    (tmp_path / "w.safetensors").unlink()
    assert "holds no .safetensors" in verify(made, weights=tmp_path).reason
    with pytest.raises(FileNotFoundError):
        verify(made, weights=tmp_path / "absent")


HEADER = {
    **{
        "unit": "example",
        "adjacency": "add_remove",
        "sampling": "poisson",
        "sample_rate": RATE,
        "dataset_size": 10_000,
    },
    **{"noise_multiplier": 1.0, "noise_rounds": 20, "mechanism": {"name": "DPSGD", "max_grad_norm": 1.0}},
    "fingerprint": "f",
}


def run_card(ledger, **changed):
    """The card of what a ledger counts."""
    fields = {
        **{"event": ledger.event(), "planned_steps": ledger.budget_steps, "spent_steps": ledger.spent_steps},
        **{
            "run_id": ledger.run_id,
            "ledger_head": ledger.head,
            "model": {"name": "gpt2", "trained_parameters": 1, "fingerprint": "f"},
        },
    }
    return card_of_run(**{**fields, **changed})


@pytest.fixture
def run(tmp_path):
    """A run of eight steps, its card, and its ledger as it was left."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger.create(path, HEADER, event=accounting.dpsgd_model(1.0, 0.02), budget_steps=20, block=3)
    for _ in range(8):
        ledger.record()
    made = run_card(ledger)
    ledger.close()
    return made, path


def test_a_run_and_its_ledger_agree(run):
    made, path = run
    result = verify(made, ledger=path)
    assert result.holds, result.reason
    assert not any("against the run's ledger" in entry for entry in result.unchecked)
    assert any("against the run's ledger" in entry for entry in verify(made).unchecked)


def test_a_true_positive_rate_below_what_the_event_allows_is_found(run):
    made, _ = run
    rate, most = next(iter(made["membership"].items()))
    result = verify(resealed({**made, "membership": {**made["membership"], rate: 0.9 * most}}))
    assert not result
    assert "states the true-positive rate" in result.reason
    page = made.to_markdown()
    assert "They test whether one example was among them" in page
    assert "| False-positive rate | True-positive rate, at most |" in page
    for rate in ("0.1%", "1.0%", "10.0%"):
        assert f"| {rate} |" in page


@cases(
    ("bound", "shown"),
    [
        (8.0, "8.00"),
        (7.9992, "8.00"),
        (7.9900001, "8.00"),
        (1e-9, "0.01"),
        (0.0, "0.00"),
        ("inf", "infinite"),
        (None, "not stated"),
    ],
)
def test_an_epsilon_is_shown_with_two_decimals_rounded_up(bound, shown):
    assert two_decimals(bound) == shown


def test_another_adjacency_or_number_of_units_is_another_epsilon(run):
    made, path = run
    body = {**made, **replace(made.claims[0], adjacency="replace_one", target=None).to_json()}
    assert "states adjacency 'replace_one'" in verify(resealed(body), ledger=path).reason
    more = [sentence.replace("10000", "20000") for sentence in made["assumptions"]]
    body = {**made, "dataset_size": 20_000, "assumptions": more}
    assert "states dataset_size 20000" in verify(resealed(body), ledger=path).reason


def test_a_ledger_that_counts_more_than_the_card_is_found(run):
    made, path = run
    with Ledger.open(path) as ledger:
        ledger.record()
    result = verify(made, ledger=path)
    assert not result
    assert "counts releases that the card's event does not hold" in result.reason
    # One that was not closed counts what it had reserved: that is said, and proves nothing against the card.
    ledger = Ledger.open(path)
    ledger.record()
    made = run_card(ledger)
    shutil.copy(path, path.with_name("copy.jsonl"))
    result = verify(made, ledger=path.with_name("copy.jsonl"))
    ledger.close()
    assert result.holds
    assert any("it was not closed" in entry for entry in result.unchecked)


def test_what_was_noted_after_the_card_is_said_beside_it(tmp_path):
    path = tmp_path / "noted.jsonl"
    ledger = Ledger.create(path, HEADER, event=accounting.dpsgd_model(1.0, 0.02), budget_steps=20)
    ledger.note("trained before", "aa")
    ledger.record()
    made = run_card(ledger)
    ledger.note("preparation-00000001", "cc")
    ledger.note("changed weights", "not by a release")
    ledger.close()
    result = verify(made, ledger=path)
    assert result.holds, result.reason
    noted = [entry for entry in result.unchecked if "the ledger notes" in entry]
    assert noted == ["what the ledger notes after the card was written: changed weights (not by a release)"]


def test_a_card_of_the_first_version_holds(run):
    made, _ = run
    first = {
        key: value for key, value in made.items() if key not in ("kind", "also", "remaining", "weights", "ledger_head")
    }
    result = verify(resealed({**first, "version": 1}))
    assert result.holds, result.reason
    assert not verify(resealed({**first, "version": 1, "model": None}))
