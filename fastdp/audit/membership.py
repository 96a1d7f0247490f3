"""Membership inference: was an example trained on? By its loss, and by its loss against reference models.

Rap-FT, section VII: perplexity as the score, ROC-AUC as the figure. The likelihood ratio is that of N. Carlini et al.,
"Membership inference attacks from first principles" (2022), in its offline form, and of F. Mireshghallah et al. (2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.stats import rankdata

#: From as many reference models on, each example's spread among them is worth estimating on its own.
_MANY_REFERENCES = 8


@dataclass(frozen=True)
class MembershipResult:
    """How well a score tells members from others.

    Attributes:
        auc: area under the ROC curve, 1/2 for guessing.
        auc_std: its standard error (Hanley and McNeil, 1982).
        tpr_at_1_percent: share of members found when at most 1% of the others are called members.
        members, others: how many of each.
    """

    auc: float
    auc_std: float
    tpr_at_1_percent: float
    members: int
    others: int


def membership(members: torch.Tensor, others: torch.Tensor) -> MembershipResult:
    """Judge an attack by its scores, higher for what looks like a member: losses with their sign turned, say.

    Args:
        members: scores of examples that were trained on, [M].
        others: scores of examples of the same distribution that were not, [N].

    Raises ValueError for an empty side, or scores that are not finite.

    >>> import torch
    >>> from fastdp.audit import membership
    >>> membership(torch.tensor([3.0, 2.0, 4.0, 5.0]), torch.tensor([1.0, 2.5])).auc
    0.875
    """
    if not (members.numel() and others.numel()):
        raise ValueError("membership inference needs examples of both kinds: members and others")
    if not bool(torch.isfinite(members).all() and torch.isfinite(others).all()):
        raise ValueError("a score is not finite: the model gives an example no likelihood")
    inside, outside = members.double().cpu(), others.double().cpu()
    m, n = inside.numel(), outside.numel()
    ranks = torch.from_numpy(rankdata(torch.cat([inside, outside]).numpy()))
    auc = float(ranks[:m].sum() - m * (m + 1) / 2) / (m * n)
    # The lowest threshold that at most 1% of the others exceed.
    threshold = outside.sort(descending=True).values[n // 100]
    return MembershipResult(auc, _spread(auc, m, n), float((inside > threshold).double().mean()), m, n)


def _spread(auc: float, m: int, n: int) -> float:
    both_members, both_others = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    variance = auc * (1 - auc) + (m - 1) * (both_members - auc**2) + (n - 1) * (both_others - auc**2)
    return (max(variance, 0.0) / (m * n)) ** 0.5


def likelihood_ratio(target: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Scores by how much likelier an example is under the target than under models that did not train on it.

    They are [N]: the mean reference loss less the target's; from 8 references on in units of the example's own spread.

    Args:
        target: losses under the target model, [N].
        references: losses under each of R reference models, [R, N].

    Raises ValueError for shapes that do not fit.

    >>> import torch
    >>> from fastdp.audit import likelihood_ratio
    >>> likelihood_ratio(torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 2.0], [4.0, 3.0]]))
    tensor([2.5000, 0.5000])
    """
    if references.dim() != 2 or not len(references) or references.shape[1:] != target.shape:
        raise ValueError(
            f"reference losses have shape {list(references.shape)}: they must be [models, {target.shape[0]}]"
        )
    ratio = references.mean(0) - target
    if len(references) < _MANY_REFERENCES:
        return ratio
    spread = references.std(0)
    return ratio / spread.clamp(min=0.1 * float(spread.mean()) or 1.0)
