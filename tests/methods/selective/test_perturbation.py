"""`SelectivePerturbation`: what is replaced, what it costs, the cache, the card, and what is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import NoiseStream
from fastdp.accounting import Card
from fastdp.methods.selective import RuleDetector, SelectivePerturbation, Span, measure_detector, token_mask
from fastdp.methods.selective.perturbation import spell_tokens
from tests.cases import cases
from tests.tokenizers_for_tests import quickstart, word_tokenizer

TEXTS = ["Please call Richard McCray on 0393 1144137.", "Nothing to see.", "Anna paid with 4111 1111 1111 1111."]


@pytest.fixture(scope="module")
def model():
    return quickstart()


def encoded(tokenizer, texts=TEXTS):
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


class Fixed:
    """A detector that reports what it is told."""

    def __init__(self, spans):
        self.spans = spans

    def detect(self, texts):
        return self.spans

    def describe(self):
        return {"name": "fixed"}


@cases("mechanism", ["local", "paper"])
def test_only_private_tokens_change(model, mechanism):
    tokenizer, table = model
    found = SelectivePerturbation(0.01, mechanism)(TEXTS, tokenizer, table)
    original = encoded(tokenizer)
    assert [len(own) for own in found.ids] == [len(own) for own in original]
    for new, old, private in zip(found.ids, original, found.private):
        assert all(n == o for n, o, hidden in zip(new, old, private) if not hidden)
    assert found.ids[1] == original[1]
    changed = sum(n != o for new, old in zip(found.ids, original) for n, o in zip(new, old))
    assert changed > (0 if mechanism == "paper" else 0.5 * sum(map(sum, found.private)))
    special = set(tokenizer.all_special_ids)
    assert not special & {token for own in found.ids for token in own}


def test_budget_of_each_text(model):
    tokenizer, table = model
    by_token = SelectivePerturbation(2.0)(TEXTS, tokenizer, table)
    assert by_token.epsilons == [2.0 * sum(own) for own in by_token.private]
    assert by_token.epsilons[1] == 0
    by_text = SelectivePerturbation(2.0, budget="text")(TEXTS, tokenizer, table)
    assert by_text.epsilons == [2.0, 0.0, 2.0]
    every = SelectivePerturbation(0.01, scope="all")(TEXTS, tokenizer, table)
    assert sum(map(sum, every.private)) == sum(map(len, encoded(tokenizer)))
    assert every.card()["settings"]["detector"] == {"name": "every token"}
    cut = SelectivePerturbation(1.0)(TEXTS, tokenizer, table, max_length=4)
    assert max(map(len, cut.ids)) == 4
    assert cut.epsilons[0] <= 4.0
    assert SelectivePerturbation(1e5)(TEXTS, tokenizer, table).ids == encoded(tokenizer)


def test_drawn_once_and_kept(model, tmp_path):
    tokenizer, table = model
    perturb = SelectivePerturbation(0.5)
    first = perturb(TEXTS, tokenizer, table, cache=tmp_path / "client" / "perturbed.safetensors")
    second = perturb(TEXTS, tokenizer, table, cache=tmp_path / "client" / "perturbed.safetensors")
    assert (second.ids, second.epsilons, second.private) == (first.ids, first.epsilons, first.private)
    assert second.from_cache
    assert not first.from_cache
    assert perturb(TEXTS, tokenizer, table).ids != first.ids
    kept = {path.name for path in (tmp_path / "client").iterdir()}
    assert kept == {"perturbed.safetensors", ".perturbed.safetensors.lock"}


def test_two_at_once_draw_once(model, tmp_path):
    """Each of six draws, or waits for the one that does and reads what it drew."""
    tokenizer, table = model
    begun = threading.Barrier(6)

    def draw(_):
        begun.wait()
        return SelectivePerturbation(0.5)(TEXTS, tokenizer, table, cache=tmp_path / "perturbed.safetensors")

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(draw, range(6)))
    assert len({str(each.ids) for each in found}) == 1
    assert [each.from_cache for each in found].count(False) == 1


def test_a_cache_of_something_else_is_refused(model, tmp_path):
    tokenizer, table = model
    path, settings = tmp_path / "perturbed.safetensors", {"epsilon": 0.5, "radius": 1.0}
    SelectivePerturbation(**settings)(TEXTS, tokenizer, table, cache=path)
    for changed, texts, rows, match in (
        ({"epsilon": 0.6}, TEXTS, table, "another epsilon; perturbing anew would spend a second budget"),
        ({}, TEXTS[:2], table, "other texts"),
        ({}, TEXTS, table + 1, "another table"),
    ):
        with pytest.raises(ValueError, match=match):
            SelectivePerturbation(**settings | changed)(texts, tokenizer, rows, cache=path)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="no cache of perturbed texts"):
        SelectivePerturbation(**settings)(TEXTS, tokenizer, table, cache=path)


def test_a_cache_made_with_other_names_is_refused(model, tmp_path):
    """As many names as before, but others: the draws would leave the new one in the clear. The cache names none of them."""
    tokenizer, table = model
    path = tmp_path / "perturbed.safetensors"

    def with_names(*names):
        return SelectivePerturbation(0.5, detector=RuleDetector(names=frozenset(names)))

    with_names("Quorra")(TEXTS, tokenizer, table, cache=path)
    assert with_names("quorra")(TEXTS, tokenizer, table, cache=path).from_cache
    with pytest.raises(ValueError, match="such as its own names; perturbing anew would spend a second budget"):
        with_names("Nothing")(TEXTS, tokenizer, table, cache=path)
    assert b"uorra" not in path.read_bytes()


def test_no_private_token_is_said_and_no_failure(model):
    tokenizer, table = model
    with pytest.warns(UserWarning, match="no private token"):
        found = SelectivePerturbation(1.0)(["nothing here"], tokenizer, table)
    assert found.ids == encoded(tokenizer, ["nothing here"])
    assert "no private token" in found.card()["notes"][0]


def test_a_private_word_outside_the_vocabulary_is_replaced_too():
    """Its id is the special unknown token's: it is private like any other, and never drawn; nor are rows that pad the table."""
    tokenizer = word_tokenizer(["call", "now", "please", "later"])
    found = SelectivePerturbation(0.1)(["call Anna now"], tokenizer, torch.eye(5))
    assert found.private == [[False, True, False]]
    assert found.ids[0][1] != tokenizer.unk_token_id
    table = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    found = SelectivePerturbation(0.01)(["call Anna now"] * 200, tokenizer, table)
    assert max(token for own in found.ids for token in own) < 5


@cases(
    ("settings", "message"),
    [
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"epsilon": float("inf")}, "epsilon is inf"),
        ({"epsilon": "1"}, "epsilon is '1': give a number"),
        ({"epsilon": None}, "epsilon is None: give a number"),
        ({"epsilon": True}, "epsilon is True: give a number"),
        ({"epsilon": 1.0, "alpha": "a"}, "alpha is 'a': give a number"),
        ({"epsilon": 1.0, "radius": "2"}, "radius is '2': give a number"),
        ({"epsilon": 1.0, "radius": -1.0}, "radius is -1.0"),
        ({"epsilon": 1.0, "mechanism": "gaussian"}, "mechanism is 'gaussian'"),
        ({"epsilon": 1.0, "budget": "corpus"}, "budget is 'corpus'"),
    ],
)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SelectivePerturbation(**settings)


def test_refused_when_called(model):
    tokenizer, table = model
    with pytest.raises(ValueError, match="lower it"):
        SelectivePerturbation(1.0, radius=1e6)(TEXTS, tokenizer, table)
    with pytest.raises(ValueError, match="all rows of the table are equal"):
        SelectivePerturbation(1.0)(TEXTS, tokenizer, torch.ones(2000, 3))
    with pytest.raises(ValueError, match="has no row in the table"):
        SelectivePerturbation(1.0, scope="all")(TEXTS, tokenizer, table[:300])
    with pytest.raises(ValueError, match="covers characters 0 to 999"):
        SelectivePerturbation(1.0, detector=Fixed([[Span("X", 0, 999)], [], []]))(TEXTS, tokenizer, table)
    with pytest.raises(ValueError, match="0 lists of spans for 3 texts"):
        SelectivePerturbation(1.0, detector=Fixed([]))(TEXTS, tokenizer, table)
    with pytest.raises(ValueError, match="no character offsets"):
        SelectivePerturbation(1.0)(TEXTS, object(), table)


def test_card(model, tmp_path):
    tokenizer, table = model
    labels = [[Span("PERSON", 12, 26), Span("COMPANY", 0, 6)], [], []]
    quality = measure_detector(RuleDetector(), TEXTS, labels, corpus="three sentences")
    card = SelectivePerturbation(2.0)(TEXTS, tokenizer, table).card(quality)
    assert card["guarantee"].startswith("epsilon-local differential privacy")
    text = card.to_markdown()
    assert "50.0% of labelled spans" in text
    assert "three sentences" in text
    assert "missed" in text
    json_path, markdown_path = card.save(tmp_path / "card")
    assert Card.load(json_path) == card
    assert markdown_path.read_text() == text


def test_cards_that_state_no_guarantee(model):
    tokenizer, table = model
    paper = SelectivePerturbation(2.0, "paper", radius=1.0)(TEXTS, tokenizer, table).card()
    assert paper["guarantee"] == "none"
    assert any("no epsilon holds" in reason for reason in paper["why_no_guarantee"])
    repeatable = SelectivePerturbation(2.0)(TEXTS, tokenizer, table, stream=NoiseStream.unsafe_reproducible(1))
    assert repeatable.card()["guarantee"] == "none"
    assert "not measured" in repeatable.card().to_markdown()


def test_a_card_names_the_generator_that_drew(model, tmp_path):
    tokenizer, table = model
    for rounds in (12, 20):
        settings = {"cache": tmp_path / f"{rounds}.safetensors", "stream": NoiseStream(rounds)}
        drawn = SelectivePerturbation(2.0)(TEXTS, tokenizer, table, **settings, again=True)
        read = SelectivePerturbation(2.0)(TEXTS, tokenizer, table, **settings)
        assert read.from_cache
        for made in (drawn, read):
            assert made.card()["noise_source"]["generator"] == f"ChaCha{rounds}"


@settings(max_examples=25, deadline=None)
@given(st.text("aZ é\u00fc\u4e2d\U0001f600.,-9", min_size=1, max_size=14), st.data())
def test_what_tokens_spell_leaves_no_private_token_out(text, data):
    """Offsets worked out from tokens mark all that the tokenizer's own mark, for any stretch, bytes of one letter among them."""
    tokenizer, _ = quickstart()
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spelled, offsets = spell_tokens(tokenizer, found["input_ids"])
    assert spelled == text
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    known = token_mask(found["offset_mapping"], [(start, end)])
    worked_out = token_mask(offsets, [(start, end)])
    assert all(own for own, needed in zip(worked_out, known) if needed)
