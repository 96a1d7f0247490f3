"""Typed cells: the exact bound on small tables, draws against their law, types of real vocabularies, and cards."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import NoiseStream
from fastdp.methods.selective import SelectivePerturbation, TypedCells
from fastdp.methods.selective.typed import SMALLEST_TYPE, token_types
from tests.ops.test_dchi import FALSE_ALARM, chi_square
from tests.tokenizers_for_tests import quickstart, word_tokenizer

from .test_perturbation import TEXTS, encoded


def cells_of(types, allowed=None):
    types = torch.tensor(types)
    candidates = torch.ones(len(types), dtype=torch.bool) if allowed is None else torch.tensor(allowed)
    return TypedCells(types, candidates)


def laws(cells, epsilon):
    return torch.stack([cells.log_probabilities(token, epsilon) for token in range(len(cells))])


@settings(max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), st.floats(0.01, 20), st.integers(0, 2**12 - 1))
def test_epsilon_between_types_and_nothing_within(types, epsilon, bits):
    """For every pair of tokens and every outcome: the same law within a type, and log ratios of epsilon exactly between types."""
    types = torch.tensor([0, 1, *types]).unique(return_inverse=True)[1]
    candidates = torch.tensor([bool(bits >> i & 1) for i in range(len(types))])
    for own in types.unique():
        candidates[int((types == own).nonzero()[0])] = True
    cells = TypedCells(types, candidates)
    found = laws(cells, epsilon)
    assert torch.allclose(found.exp().sum(1), torch.ones(len(types)).double())
    assert bool((torch.isinf(found) == ~candidates).all())
    inside = found[:, candidates]
    apart = (inside[:, None] - inside[None]).abs().amax(2)
    same = types[:, None] == types
    assert float(apart[same].max()) == 0.0
    expected = torch.where(same, 0.0, epsilon).flatten()
    assert torch.allclose(apart.flatten(), expected.double(), atol=1e-9)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_draws_follow_the_law(epsilon):
    cells = cells_of([0, 1, 1, 2, 2, 2, 0, 1], [True, True, True, True, False, True, False, True])
    stream = NoiseStream.unsafe_reproducible(7)
    for token, law in enumerate(laws(cells, epsilon).exp()):
        assert chi_square(cells.draw(torch.full((20_000,), token), epsilon, stream), law.numpy()) > FALSE_ALARM


def test_each_token_may_have_its_own_epsilon():
    cells = cells_of([0, 0, 1, 1])
    ids, epsilons = torch.tensor([0, 2] * 4000), torch.tensor([0.1, 20.0] * 4000, dtype=torch.float64)
    drawn = cells.draw(ids, epsilons, NoiseStream.unsafe_reproducible(1))
    stayed = cells.types[drawn] == cells.types[ids]
    assert bool(stayed[1::2].all())
    # Half and a little: five deviations of 4,000 coins are .04.
    assert abs(float(stayed[::2].double().mean()) - 1 / (1 + math.exp(-0.1))) < 0.04
    assert cells.draw(torch.empty(0, dtype=torch.int64), 1.0, NoiseStream()).shape == (0,)


def test_types_of_a_real_vocabulary():
    tokenizer, table = quickstart()
    candidates = torch.ones(len(tokenizer), dtype=torch.bool)
    candidates[tokenizer.all_special_ids] = False
    types, names = token_types(tokenizer, candidates)
    assert min(torch.bincount(types[candidates]).tolist()) >= SMALLEST_TYPE
    assert len(names) == len(set(types.tolist()))
    by_token = {token: names[types[i]] for token, i in tokenizer.get_vocab().items()}
    digits = {name for token, name in by_token.items() if token.isdecimal()}
    words = {name for token, name in by_token.items() if token.isalpha() and token.islower() and len(token) > 3}
    assert not digits & words


def test_marks_of_three_tokenizers_and_names():
    from fastdp.methods.selective.typed import describe_token

    assert describe_token("\u0120Anna", {"\u0120"}, True) == "begins, name"
    assert describe_token("Anna", {"\u0120"}, True) == "goes on, capitalised"
    assert describe_token("\u01201998", {"\u0120"}, True) == "begins, 4 digits"
    assert describe_token("##ing", set(), False) == "goes on, lower case"
    assert describe_token("anna", set(), False) == "begins, name"
    assert describe_token("\u2581NATO", {"\u2581"}, True) == "begins, capitals"
    assert describe_token("!", {"\u0120"}, True) == "goes on, other"
    assert describe_token("", {"\u0120"}, True) == "goes on, other"


def test_only_private_tokens_change_and_words_keep_their_form():
    tokenizer, table = quickstart()
    found = SelectivePerturbation(20.0, "typed")(TEXTS, tokenizer, table)
    candidates = torch.ones(len(tokenizer), dtype=torch.bool)
    candidates[tokenizer.all_special_ids] = False
    types, _ = token_types(tokenizer, candidates)
    changed = 0
    for new, old, private in zip(found.ids, encoded(tokenizer), found.private):
        assert all(n == o for n, o, hidden in zip(new, old, private) if not hidden)
        # At epsilon 20 a type changes less than once in ten million draws.
        assert torch.equal(types[new], types[old])
        changed += sum(n != o for n, o in zip(new, old))
    assert changed > 0.5 * sum(map(sum, found.private))
    assert found.card()["settings"]["radius"] is None
    assert any("epsilon is 0" in note for note in found.card()["notes"])
    assert found.epsilons == [20.0 * sum(own) for own in found.private]


def test_refusals():
    tokenizer, table = quickstart()
    with pytest.raises(ValueError, match="must lie between"):
        SelectivePerturbation(40.0, "typed")(TEXTS, tokenizer, table)
    with pytest.raises(ValueError, match="no token of type 1 may be drawn"):
        cells_of([0, 1], [True, False])
    with pytest.raises(ValueError, match="two at least"):
        cells_of([0, 0])
    with pytest.raises(IndexError, match="outside the 2 tokens"):
        cells_of([0, 1]).draw(torch.tensor([2]), 1.0, NoiseStream())
    words = word_tokenizer(["red", "blue", "Anna"])
    with pytest.raises(ValueError, match="use another mechanism"):
        token_types(words, torch.ones(len(words), dtype=torch.bool))
