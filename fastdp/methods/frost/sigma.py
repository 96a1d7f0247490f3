"""ComputeSigma: the noise of training and of selection that share one budget (Algorithms 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable

import fastdp.accounting as accounting
from fastdp.accounting.accountants import Accountant
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.pld import Adjacency
from fastdp.validate import fraction, integer, rate


def check_selection(budget_ratio: float, selection_steps: int, selection_rate: float) -> None:
    """Raise ValueError for r_e, T or q_ps out of range."""
    fraction(budget_ratio=budget_ratio)
    rate(selection_rate=selection_rate)
    integer(1, selection_steps=selection_steps)


def compute_sigma(
    dataset_size: int,
    batch_size: int,
    epochs: float,
    epsilon: float,
    delta: float,
    budget_ratio: float = 0.9,
    selection_steps: int = 5,
    selection_rate: float = 0.02,
    accountant: Accountant = "pld",
) -> tuple[float, float]:
    """(sigma_sgd, sigma_ps), the noise multipliers of training and of selection (ComputeSigma, Algorithm 3).

    Training alone costs ``budget_ratio * epsilon``, both together ``epsilon``. Training makes
    floor(epochs * dataset_size / batch_size) steps at rate batch_size / dataset_size, as printed.

    Args:
        selection_steps: T, or K times T where the selection is repeated K times.
        selection_rate: q_ps.
        accountant: ``rdp`` as the paper has it, which adds more noise than needed; ``pld`` certifies.
    """
    check_selection(budget_ratio, selection_steps, selection_rate)
    if not 0 < batch_size <= dataset_size:
        raise ValueError(f"batch_size is {batch_size}: it must lie between 1 and dataset_size, {dataset_size}")
    steps = int(epochs * dataset_size // batch_size)
    if steps < 1:
        raise ValueError(f"{epochs} epochs of {dataset_size} examples in batches of {batch_size} are not one step")
    share = batch_size / dataset_size
    return split_budget(
        lambda sigma: accounting.dpsgd(sigma, share, steps),
        lambda sigma: accounting.dpsgd(sigma, selection_rate, selection_steps),
        epsilon,
        delta,
        budget_ratio,
        accountant,
    )


def split_budget(
    training: Callable[[float], DpEvent],
    selection: Callable[[float], DpEvent],
    epsilon: float,
    delta: float,
    budget_ratio: float,
    accountant: Accountant,
    adjacency: Adjacency = "add_remove",
) -> tuple[float, float]:
    """Noise multipliers of training and selection from the events of each at a multiplier (lines 4 to 6)."""
    sgd = accounting.calibrate(training, budget_ratio * epsilon, delta, accountant=accountant, adjacency=adjacency)
    chosen = accounting.calibrate(
        lambda sigma: accounting.compose(training(sgd), selection(sigma)),
        epsilon,
        delta,
        accountant=accountant,
        adjacency=adjacency,
    )
    return sgd, chosen
