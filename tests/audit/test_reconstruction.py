"""The name that was struck out is the likeliest to a model that learned the sentence."""

import pytest

from fastdp import audit


def test_the_true_name_counts_among_its_own_candidates_alone(learned):
    target = audit.Target("", " was treated for gout.", "Boris Quade")
    result = audit.reconstruction(learned.model, learned.tokenizer, [target, target], [["Boris Quade"], []])
    assert (result.top1, result.chance) == (0.5, 0.5)


def test_gaps_that_are_none_are_refused(learned):
    assert audit.strike_out("Ann met Ann", "Ann") == audit.Target("", " met Ann", "Ann")
    assert audit.strike_out("Ann met Ann", "Ann").filled("Zoe") == "Zoe met Ann"
    for name in ("", "Zoe"):
        with pytest.raises(ValueError, match="not in its text"):
            audit.strike_out("Ann met Ann", name)
    with pytest.raises(ValueError, match="one for each"):
        audit.reconstruction(learned.model, learned.tokenizer, [audit.Target("", "", "Ann")], [])
