"""Attribute inference: a classifier that reads a private attribute off released representations (SAP, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fastdp.audit.figures import Figures


@dataclass(frozen=True)
class AttributeResult(Figures):
    """How often the attribute was inferred.

    Attributes:
        accuracy: share of the attacked examples whose attribute was guessed.
        majority: what always guessing their most frequent attribute would give.
        empirical_privacy: 1 - accuracy.
        known, attacked: examples with known attributes, and attacked ones.
    """

    accuracy: float
    majority: float
    empirical_privacy: float
    known: int
    attacked: int


def pooled(released: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """What `attribute_inference` reads of a sequence: the mean over its tokens.

    Args:
        released: representations of tokens, [N, T, d], of any floating type.
        mask: bool [N, T], which tokens are there; by default all.

    Returns:
        float32 [N, d]; zeros for a sequence without tokens.

    Raises:
        RuntimeError: a mask that is not [N, T].

    >>> import torch
    >>> from fastdp.audit import pooled
    >>> pooled(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]]]), torch.tensor([[True, True, False]]))
    tensor([[2., 3.]])
    """
    if mask is None:
        return released.float().mean(1)
    weights = mask.to(released.device).float().unsqueeze(-1)
    return (released.float() * weights).sum(1) / weights.sum(1).clamp(min=1)


def attribute_inference(
    known: torch.Tensor,
    attributes: torch.Tensor,
    attacked: torch.Tensor,
    truth: torch.Tensor,
    *,
    hidden: int = 0,
    weight_decay: float = 1e-3,
    iterations: int = 200,
    seed: int = 0,
) -> AttributeResult:
    """Train a classifier on representations whose attribute is known, and use it on the others.

    Args:
        known, attacked: representations [K, d] and [N, d]; see `pooled`.
        attributes, truth: their attributes, int64 [K] and [N], counted from 0.
        hidden: width of a hidden layer; 0 makes the classifier linear.
        weight_decay: factor of the weights' squares in the loss.
        iterations: of L-BFGS, at most.
        seed: of the classifier's first weights.

    Raises:
        ValueError: shapes that do not fit, or fewer than two attributes among the known.

    >>> import torch
    >>> from fastdp.audit import attribute_inference
    >>> known = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    >>> attribute_inference(known, torch.tensor([0, 0, 1, 1]), known.flip(0), torch.tensor([1, 1, 0, 0])).accuracy
    1.0
    """
    for rows, labels in ((known, attributes), (attacked, truth)):
        if rows.dim() != 2 or labels.shape != rows.shape[:1] or not len(rows):
            raise ValueError(
                f"representations of shape {list(rows.shape)} and attributes of shape {list(labels.shape)}: they must be "
                "[N, d] and [N]"
            )
    if attributes.unique().numel() < 2:
        raise ValueError("the known examples all have one attribute: there is nothing to learn")
    centre, spread = known.float().mean(0), known.float().std(0).clamp(min=1e-6)
    model = _train((known.float() - centre) / spread, attributes, hidden, weight_decay, iterations, seed)
    with torch.no_grad():
        guessed = model((attacked.float() - centre) / spread).argmax(-1)
    accuracy = float((guessed == truth).double().mean())
    majority = float(truth.bincount().max()) / len(truth)
    return AttributeResult(accuracy, majority, 1 - accuracy, len(known), len(attacked))


def _train(
    rows: torch.Tensor, labels: torch.Tensor, hidden: int, weight_decay: float, iterations: int, seed: int
) -> nn.Module:
    classes = int(labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wide: list[nn.Module] = [nn.Linear(rows.shape[1], hidden), nn.ReLU()] if hidden else []
        model = nn.Sequential(*wide, nn.Linear(hidden or rows.shape[1], classes)).to(rows.device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=iterations, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters() if p.dim() > 1)
        loss = F.cross_entropy(model(rows), labels) + weight_decay / 2 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return model
