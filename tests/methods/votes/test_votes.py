"""Private votes: one record one vote, noise as accounted, budget before noise, and evolution towards the records."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

import fastdp
from fastdp.accounting import BudgetExceeded, verify
from fastdp.methods.votes import PrivateVotes, evolve, vote_counts
from tests.cases import cases

BUDGET = {"target_epsilon": 4.0, "target_delta": 1e-3}
WORDS = ["aa", "bb", "cc", "dd"]


def embed(texts):
    """Letters counted."""
    return torch.tensor([[text.count(letter) for letter in "abcd"] for text in texts], dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 9), st.integers(1, 3))
def test_one_record_more_changes_one_count_by_one(seed, records, candidates, labels):
    generator = torch.Generator().manual_seed(seed)
    rows, table = (torch.randint(-3, 4, (n, 2), generator=generator).float() for n in (records, candidates))
    row_labels, table_labels = (torch.randint(labels, (n,), generator=generator) for n in (records, candidates))
    after = vote_counts(rows, row_labels, table, table_labels)
    before = vote_counts(rows[1:], row_labels[1:], table, table_labels)
    moved = after - before
    assert moved.min() >= 0
    assert moved.sum() == int((table_labels == row_labels[0]).any())


def test_records_that_are_not_finite_do_not_vote():
    rows = torch.tensor([[0.0, 0.0], [math.nan, 0.0], [math.inf, 1.0]])
    zeros = torch.zeros(3, dtype=torch.int64)
    assert vote_counts(rows, zeros, torch.zeros(1, 2), zeros[:1]).tolist() == [1]


def test_private_texts_are_embedded_alone():
    sizes = []
    votes = PrivateVotes(WORDS, lambda texts: sizes.append(len(texts)) or embed(texts), rounds=1, **BUDGET)
    assert sizes == [1] * len(WORDS)
    votes.count({"": WORDS})
    assert sizes[-1] == len(WORDS)


def test_noise_has_the_accounted_deviation():
    """20,000 counts of nothing: the sum of their squares has its law; false alarms: 1 in 10^9."""
    votes = PrivateVotes(["a"], embed, rounds=1, target_epsilon=1.0, target_delta=1e-3)
    found = votes.count({"": ["d"] * 20_000})[""]
    # The only record votes for the first of equal candidates.
    square = float(((found[1:] / votes.noise_multiplier).double() ** 2).sum())
    assert 2 * min(stats.chi2.cdf(square, 19_999), stats.chi2.sf(square, 19_999)) > 1e-9


def test_the_budget_holds_and_the_card_is_verified(tmp_path):
    votes = PrivateVotes(WORDS, embed, rounds=2, output_dir=tmp_path, **BUDGET)
    assert votes.epsilon() == 0
    votes.count({"": WORDS})
    assert 0 < votes.epsilon() < 4
    votes.count({"": WORDS})
    assert votes.epsilon() <= 4
    with pytest.raises(BudgetExceeded):
        votes.count({"": WORDS})
    votes.card().save(tmp_path / "card")
    assert verify(tmp_path / "card.json")
    votes.close()
    again = PrivateVotes(WORDS, embed, rounds=2, output_dir=tmp_path, resume=True, **BUDGET)
    with pytest.raises(BudgetExceeded):
        again.count({"": WORDS})
    again.close()


def test_a_reproducible_key_voids_the_claim():
    votes = PrivateVotes(WORDS, embed, rounds=1, unsafe_seed=1, **BUDGET)
    votes.count({"": WORDS})
    assert math.isinf(votes.epsilon())
    assert votes.card()["guarantee"] == "none"


@cases(
    ("changes", "named"),
    [
        ({"texts": []}, "no text"),
        ({"labels": ["x"]}, "labels"),
        ({"rounds": 0}, "rounds"),
        ({"embed": lambda texts: torch.zeros(2 * len(texts), 4)}, "for 1 texts"),
        ({"embed": lambda texts: torch.zeros(4)}, "for 1 texts"),
        ({"target_delta": 0.5}, "target_delta"),
        ({"target_epsilon": -1.0}, "epsilon"),
    ],
)
def test_arguments_are_checked(changes, named):
    with pytest.raises(ValueError, match=named):
        PrivateVotes(**{"texts": WORDS, "embed": embed, "rounds": 1, **BUDGET, **changes})


@pytest.mark.parametrize(("candidates", "named"), [({"x": ["a"]}, "'x'"), ({"": []}, "no candidates")])
def test_candidates_are_checked_before_budget_is_spent(candidates, named):
    votes = PrivateVotes(WORDS, embed, rounds=1, **BUDGET)
    with pytest.raises(ValueError, match=named):
        votes.count(candidates)
    assert votes.epsilon() == 0


def test_evolution_finds_what_the_records_are_like():
    generator = torch.Generator().manual_seed(0)

    def random_texts(label, count):
        return ["".join("abcd"[i] for i in torch.randint(4, (6,), generator=generator)) for _ in range(count)]

    def vary(label, texts):
        changed = []
        for text in texts:
            at, letter = (
                int(torch.randint(6, (1,), generator=generator)),
                int(torch.randint(4, (1,), generator=generator)),
            )
            changed.append(text[:at] + "abcd"[letter] + text[at + 1 :])
        return changed

    texts, labels = ["aaaaaa"] * 400 + ["dddddd"] * 400, ["first"] * 400 + ["last"] * 400
    votes = fastdp.PrivateVotes(texts, embed, labels=labels, rounds=10, target_epsilon=8.0, target_delta=1e-4)
    found = evolve(votes, random_texts, vary, 20, variations=3, threshold=2 * votes.noise_multiplier)
    # Random texts have 1.5 of their own letter.
    assert sum(text.count("a") for text in found["first"]) / 20 > 4
    assert sum(text.count("d") for text in found["last"]) / 20 > 4


def test_so_many_texts_that_counts_were_rounded_are_refused():
    """2^24 + 1 is no float32: one vote more or less would move the released count by 0 or by 2."""
    assert float(torch.tensor(2**24 + 1).float()) == 2**24
    with pytest.raises(ValueError, match="counts are exact below 16777216: give fewer"):
        PrivateVotes([""] * 2**24, embed, rounds=1, **BUDGET)


def test_evolution_names_a_generator_that_gives_too_few_and_refuses_to_begin_without_a_round():
    votes = PrivateVotes(WORDS, embed, rounds=1, **BUDGET)
    with pytest.raises(ValueError, match="generate gave 1 texts where 4"):
        evolve(votes, lambda label, count: ["a"], lambda label, texts: texts, 2)
    evolve(votes, lambda label, count: WORDS[:1] * count, lambda label, texts: texts, 2)
    with pytest.raises(ValueError, match="rounds_left must be a finite number of at least 1, got 0"):
        evolve(votes, lambda label, count: WORDS[:1] * count, lambda label, texts: texts, 2)
