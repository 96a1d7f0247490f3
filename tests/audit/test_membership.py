"""ROC-AUC against its definition, and attacks on a model that knows its training data by heart."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import audit

scores = st.lists(st.integers(-4, 4), min_size=1, max_size=12).map(lambda values: torch.tensor(values).float())


@settings(max_examples=50)
@given(members=scores, others=scores)
def test_auc_is_the_probability_that_a_member_scores_higher(members, others):
    pairs = members.unsqueeze(1) - others
    expected = float(((pairs > 0).double() + (pairs == 0).double() / 2).mean())
    assert audit.membership(members, others).auc == pytest.approx(expected, abs=1e-12)


def test_members_found_at_one_percent():
    others = torch.arange(200.0)
    # 198 and above is what 1% of the others have; the third highest of them is the threshold.
    result = audit.membership(torch.tensor([196.0, 197.5, 198.5, 250.0]), others)
    assert result.tpr_at_1_percent == 0.75
    assert (result.members, result.others) == (4, 200)
    assert audit.membership(others, others).tpr_at_1_percent == pytest.approx(0.01)


def test_the_standard_error_covers_the_spread_of_the_auc():
    torch.manual_seed(0)
    results = [audit.membership(torch.randn(200) + 0.5, torch.randn(200)) for _ in range(200)]
    spread = torch.tensor([r.auc for r in results]).std()
    assert float(spread) == pytest.approx(results[0].auc_std, rel=0.25)  # five standard errors of a spread of 200


@pytest.mark.parametrize("references", [1, 16])
def test_the_likelihood_ratio_sees_past_examples_that_are_hard_by_themselves(references):
    """Members are .3 likelier than without training, among examples whose losses differ by 1."""
    torch.manual_seed(0)
    hardness = torch.randn(4000)
    fall = torch.cat([torch.full((2000,), 0.3), torch.zeros(2000)])
    target = hardness - fall + 0.1 * torch.randn(4000)
    others = hardness + 0.1 * torch.randn(references, 4000)
    by_loss = audit.membership(-target[:2000], -target[2000:]).auc
    ratio = audit.likelihood_ratio(target, others)
    assert by_loss < 0.65
    assert audit.membership(ratio[:2000], ratio[2000:]).auc > 0.9


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="both kinds"):
        audit.membership(torch.zeros(0), torch.zeros(3))
    with pytest.raises(ValueError, match="not finite"):
        audit.membership(torch.tensor([float("nan")]), torch.zeros(3))
    with pytest.raises(ValueError, match="models, 3"):
        audit.likelihood_ratio(torch.zeros(3), torch.zeros(2, 4))
