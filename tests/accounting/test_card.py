"""The card and its verification."""

import json
import math
import os

import pytest

from fastdp import accounting
from fastdp.accounting import Card, page, verify
from fastdp.accounting.card import among_units, digest
from tests.cases import cases

RATE, STEPS = 0.02, 40


def card_of_run(**changed):
    """The card of a small run, with other fields where a test says so."""
    fields = {
        "mechanism": {"name": "DPSGD", "max_grad_norm": 1.0},
        "unit": "example",
        "adjacency": "add_remove",
        "sampling": "poisson",
        "sample_rate": RATE,
        "dataset_size": 10_000,
        "noise_multiplier": 1.0,
        "event": accounting.dpsgd(1.0, RATE, STEPS),
        "delta": 1e-5,
        "target_epsilon": 8.0,
        "planned_steps": 50,
        "spent_steps": STEPS,
        "noise_source": {"generator": "ChaCha20", "key": "operating system", "secure_rounding": False},
        "model": {"name": "gpt2", "trained_parameters": 1234},
        **changed,
    }
    return Card.build(**fields)


def _resealed(card, **changed):
    """The card of someone who alters it and knows how to renew its digest."""
    body = {**card, **changed}
    body["digest"] = digest(body)
    return body


def test_a_card_verifies_from_its_file_alone(tmp_path):
    card = card_of_run()
    found = accounting.epsilon(accounting.dpsgd(1.0, RATE, STEPS), 1e-5)
    assert card["epsilon"]["upper_bound"] == found
    assert card["epsilon"]["accountant"] == "pld"
    assert card.claims[0].event == accounting.dpsgd(1.0, RATE, STEPS)
    json_path, markdown_path = card.save(tmp_path / "out" / "card.json")
    assert (json_path.name, markdown_path.name) == ("card.json", "card.md")
    assert Card.load(json_path) == card
    for form in (card, dict(card), json_path, str(json_path), json_path.read_text()):
        result = verify(form)
        assert result
        assert result.guarantee
        assert result.recomputed == pytest.approx(found, rel=1e-6)


def test_markdown_states_what_matters():
    text = card_of_run(notes=["a note"], unprotected=["the mask"]).to_markdown()
    found = accounting.epsilon(accounting.dpsgd(1.0, RATE, STEPS), 1e-5)
    shown = text.split("epsilon <= ")[1].split(" ")[0]
    assert shown == "1.08"
    assert text.count("1.08") == 1, "once, rounded up to two decimals, and the exact bound below"
    assert f"| Exact upper bound of epsilon | {found} (PLD" in text
    for part in (
        "delta = 1e-05",
        "40 spent of 50 planned",
        "hyper-parameters",
        "training loss",
        "the mask",
        "a note",
        "poisson_sampled",
        "10000, is public",
        "secure_rounding: False",
        "floating-point",
        "gpt2",
    ):
        assert part in text


@cases(
    ("changed", "match"),
    [
        ({"noise_multiplier": 0.0, "event": accounting.dpsgd(0.0, RATE, STEPS)}, "without noise"),
        ({"noise_source": {"key": "unsafe_reproducible"}}, "reproducible key"),
        ({"flaws": ["the mask was computed from private data"]}, "private data"),
        ({"delta": None}, "no delta"),
        ({"delta": 1e-4}, "1/N"),
    ],
)
def test_no_guarantee_is_said_and_verified_as_none(changed, match):
    card = card_of_run(**changed)
    assert card["guarantee"] == "none"
    assert match in card["why_no_guarantee"][0]
    assert "**Guarantee: none.**" in card.to_markdown()
    assert "epsilon <=" not in card.to_markdown()
    result = verify(card)
    assert result.holds
    assert not result.guarantee
    assert match in result.reason


def test_an_infinite_epsilon_is_json():
    card = card_of_run(noise_multiplier=0.0, event=accounting.dpsgd(0.0, RATE, STEPS))
    assert card["epsilon"]["upper_bound"] == "inf"
    assert verify(json.loads(card.to_json())).claimed == math.inf


def test_a_run_that_released_nothing_costs_nothing():
    result = verify(card_of_run(event=accounting.dpsgd(1.0, RATE, 0), spent_steps=0))
    assert result.guarantee
    assert result.claimed == 0.0


def test_shuffled_batches_are_verified_by_epochs():
    card = card_of_run(
        sampling="shuffled",
        sample_rate=0.1,
        noise_multiplier=3.0,
        event=accounting.dpsgd(3.0, 0.1, 25, "shuffled", 10),
        spent_steps=25,
    )
    assert verify(card).guarantee
    assert any("no amplification" in assumption for assumption in card["assumptions"])
    fewer = accounting.serialise(accounting.dpsgd(3.0, 0.1, 20, "shuffled", 10))
    assert "fewer" in verify(_resealed(card, event=fewer)).reason


def test_a_methods_assumptions_stand_beside_the_cards_own():
    own = card_of_run()["assumptions"]
    assert card_of_run(assumptions=("each record came once",))["assumptions"] == [*own, "each record came once"]


@cases("factor", [0.0, 0.5, 0.99, 1 - 1e-4])
def test_a_lower_claim_is_found(factor):
    card = card_of_run()
    claim = {**card["epsilon"], "upper_bound": factor * card["epsilon"]["upper_bound"]}
    result = verify(_resealed(card, epsilon=claim))
    assert not result
    assert "its event costs" in result.reason
    assert result.recomputed == pytest.approx(card["epsilon"]["upper_bound"])


def test_claims_are_read_of_a_card_that_nobody_has_checked():
    card = card_of_run()
    for missing in ({"also"}, {"also", "kind"}):
        cut = Card({key: value for key, value in card.items() if key not in missing})
        assert cut.claims == card.claims
        assert page.claims(cut) == [cut]


@cases(
    "text",
    ["{", "[]", "{}", '{"format": "fastdp.statement"}', '{"format": "fastdp.card", "version": 1}', "[" * 100_000],
)
def test_what_is_no_card_is_refused(text, tmp_path):
    assert not verify(text)
    path = tmp_path / "card.json"
    path.write_text(text)
    assert not verify(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "absent.json")


def test_a_failed_save_keeps_the_old_card(tmp_path, monkeypatch):
    card = card_of_run()
    card.save(tmp_path / "card")
    before = (tmp_path / "card.json").read_bytes()

    def refuse(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        card_of_run(unit="user").save(tmp_path / "card")
    assert (tmp_path / "card.json").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["card.json", "card.md"]


def test_values_that_are_not_json_are_refused():
    with pytest.raises(TypeError):
        card_of_run(model={"name": object()})


def test_rounding_among_units_is_stated():
    assert among_units(1, 1000, 10.0) == 0
    assert among_units(65, 8192, 10.0) == pytest.approx(2 * 64 * 10 * 8195 * 2.0**-24, rel=1e-3)
    assert among_units(2, 10**9, 1.0) == float("inf")
