"""Our epsilon against lower bounds on the truth by other libraries, over random runs.

A certified figure may lie above the truth and never below it. What bounds the truth from below: the closed form where
nothing is sampled; `dp_accounting`'s optimistic loss distributions elsewhere, at a delta larger by what Fourier
transforms round; and `prv_accountant`'s lower bound where it is done within seconds.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import special

import fastdp.accounting as accounting

#: What must be among the runs, whatever the draw: rate 1, a million steps, delta 1e-12, epsilon near .01.
CORNERS = (
    (1.0, 400.0, 1000, 1e-12),
    (1.0, 2.0, 1, 1e-5),
    (1e-3, 5.0, 1_000_000, 1e-5),
    (1e-4, 0.7, 1_000_000, 1e-8),
    (0.01, 40.0, 100, 1e-5),
    (0.01, 1.0, 10, 1e-12),
)
_POINTS = 400_000
_PRV_STEPS = 2_000


@dataclass(frozen=True)
class Run:
    """A run of DP-SGD, and what is asked of it."""

    rate: float
    multiplier: float
    steps: int
    delta: float
    adjacency: str = "add_remove"


def runs(count: int, seed: int = 0) -> list[Run]:
    """The corners and as many random runs as make ``count``: rates, steps and deltas uniform in their logarithms."""
    draw = np.random.default_rng(seed)
    found = [Run(*corner) for corner in CORNERS[:count]]
    while len(found) < count:
        rate = 1.0 if draw.random() < 0.1 else float(10 ** draw.uniform(-4, -0.3))
        steps = int(10 ** draw.uniform(0, 4 if draw.random() < 0.9 else 6))
        multiplier = float(max(0.4, 10 ** draw.uniform(-0.3, 1.3) * max(rate * math.sqrt(steps), 0.3)))
        adjacency = "replace_one" if draw.random() < 0.25 else "add_remove"
        found.append(Run(rate, multiplier, steps, float(10 ** draw.uniform(-12, -3)), adjacency))
    return found


def compare(run: Run) -> dict[str, Any]:
    """The run with ``ours`` (None if refused, ``said`` why) and each lower bound on the truth, by name."""
    event = accounting.dpsgd(run.multiplier, run.rate, run.steps)
    start = time.perf_counter()
    row: dict[str, Any] = asdict(run)
    try:
        row["ours"] = float(accounting.epsilon(event, run.delta, adjacency=run.adjacency))  # type: ignore[arg-type]
    except ValueError as error:
        return {**row, "ours": None, "said": str(error)}
    row["seconds"] = round(time.perf_counter() - start, 3)
    if run.rate == 1:
        row["closed_form"] = _closed_form(run)
    else:
        row["dp_accounting"] = _optimistic(run, row["ours"])
        if (
            run.adjacency == "add_remove"
            and run.steps <= _PRV_STEPS
            and math.isfinite(row["ours"])
            and row["ours"] < 50
        ):
            row["prv_accountant"] = _prv(run)
    return row


def holds(row: dict[str, Any]) -> bool:
    """Whether our figure lies below none of the lower bounds."""
    bounds = [row[name] for name in ("closed_form", "dp_accounting", "prv_accountant") if row.get(name) is not None]
    return row["ours"] is None or all(bound <= row["ours"] * (1 + 1e-9) for bound in bounds)


def _closed_form(run: Run) -> float:
    # Balle and Wang 2018, Theorem 8, by bisection; written apart from the package's own.
    mu = math.sqrt(run.steps) / run.multiplier * (2 if run.adjacency == "replace_one" else 1)

    def delta(epsilon: float) -> float:
        below = special.log_ndtr(-mu / 2 - epsilon / mu)
        return float(special.ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + below))

    low, high = 0.0, mu * mu / 2 + 40 * mu
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > run.delta else (low, middle)
    return low


def _optimistic(run: Run, near: float) -> float:
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    relations = {"add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE}
    interval = max(1e-6, 4 * max(near, 0.05) / _POINTS, 20 / run.multiplier**2 / _POINTS)
    one = pld.from_gaussian_mechanism(
        run.multiplier,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        sampling_prob=run.rate,
        use_connect_dots=False,
        neighboring_relation=relations[run.adjacency],
    )
    spare = 4 * float(np.finfo(np.float64).eps) * run.steps
    return float(one.self_compose(run.steps).get_epsilon_for_delta(run.delta + spare))


def _prv(run: Run) -> float | None:
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one = PoissonSubsampledGaussianMechanism(run.rate, run.multiplier)
            accountant = PRVAccountant(
                prvs=[one], max_self_compositions=[run.steps], eps_error=0.05, delta_error=run.delta / 1000
            )
            lower = float(accountant.compute_epsilon(run.delta, [run.steps])[0])
        except (ArithmeticError, RuntimeError, ValueError, IndexError):
            return None
    return lower if math.isfinite(lower) else None


def measure(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """A row a run."""
    for run in runs(count, seed):
        row = compare(run)
        yield {**row, "holds": holds(row)}
