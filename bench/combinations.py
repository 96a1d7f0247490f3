"""Which method goes with which sampling and adjacency, and which accountants bound what it releases: tried, and written down.

``python -m bench.combinations`` writes `docs/combinations.md` from the root of a checkout.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fastdp
from fastdp.accounting import chosen, compose, epsilon, gaussian, renyi
from fastdp.accounting.event_types import DpEvent
from fastdp.methods.rapft import NoisyMap

from .record import markdown

PAGE = Path("docs/combinations.md")
#: Each with what it is called on the page; made anew for each run.
METHODS: dict[str, Any] = {
    "DP-SGD": lambda: fastdp.DPSGD(),
    "DP-SGD by layer": lambda: fastdp.DPSGD(groups="per_layer"),
    "DP-SGD, adaptive thresholds": lambda: fastdp.DPSGD(adaptive=fastdp.AdaptiveClipping()),
    "DP-SGD, noise on a schedule": lambda: fastdp.DPSGD(noise_schedule={0: 1.5, 2: 1.0}),
    "Rap-FT, a private map": lambda: fastdp.RapFT(NoisyMap(2.0, 0.5)),
    "Rap-FT, along axes": lambda: fastdp.RapFT(NoisyMap(2.0, 0.5), allocation="axes"),
    "DP-FROST": lambda: fastdp.DPFrost(unfreezing_ratio=0.9, selection_noise_multiplier=2.0),
}
COLUMNS = (
    *(("poisson", "add_remove"), ("poisson", "replace_one")),
    *(("shuffled", "zero_out"), ("shuffled", "replace_one"), ("shuffled", "add_remove")),
)
ACCOUNTANTS = ("pld", "prv", "rdp")
DELTA = 1e-3

HEAD = """# What goes with what

Written by `python -m bench.combinations`, which tries each on a small model. A cell holds the accountants that bound what
the run releases: `pld` certifies, and stands on the card; `prv` and `rdp` are cross-checks (`fastdp epsilon --compare`).

"""
TAIL = """
Adjacency says what neighbouring data sets differ in ([the words](glossary.md)). Local methods (EW-FT, SAP, selective
perturbation) draw no batches: each text is perturbed as it is. EW-FT's noise on hidden states is one event more, bounded by
`pld`; the others' cards state bounds of another kind, which add up.
"""


class Classifier(torch.nn.Module):
    """The smallest model with more than one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of a batch, [rows, 5] and [rows]."""
        return {"loss": F.cross_entropy(self.second(torch.tanh(self.first(x))), labels)}


def released(method: Any, sampling: str, adjacency: str) -> DpEvent:
    """All that a run of two passes by this method would release, as one event; raises ValueError where it is refused."""
    model = Classifier()
    rows = [{"x": torch.randn(5), "labels": i % 3} for i in range(40)]
    private = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(rows, batch_size=8),  # type: ignore[arg-type]
        method=method,
        sampling=sampling,
        adjacency=adjacency,
        target_epsilon=4.0,
        target_delta=DELTA,
        epochs=2,
    )
    private.detach()
    plan = private.plan
    return compose(plan.event().event(plan.steps), *(side.event.event(side.count) for side in plan.side))


def bounded_by(event: DpEvent, adjacency: Any) -> str:
    """The accountants that have a bound for an event."""
    found = []
    for accountant in ACCOUNTANTS:
        try:
            found += [accountant] * math.isfinite(epsilon(event, DELTA, accountant, adjacency))  # type: ignore[arg-type]
        except ValueError:
            continue
    return ", ".join(found)


def page() -> str:
    """The page, from what was tried."""
    rows = []
    refused: dict[str, None] = {}
    for name, method in METHODS.items():
        cells = []
        for sampling, adjacency in COLUMNS:
            try:
                cells.append(bounded_by(released(method(), sampling, adjacency), adjacency))
            except ValueError as error:
                refused[str(error)] = None
                cells.append("refused")
        rows.append([name, *cells])
    searched = chosen([released(fastdp.DPSGD(), "poisson", "add_remove"), gaussian(2.0)], 0.0, renyi.stop_for(6, 0.0))
    rows.append(["DP-SGD, settings searched", bounded_by(searched, "add_remove"), "not offered", "", "", ""])
    first, *lines = markdown(["method", *map(", ".join, COLUMNS)], rows)
    told = ["", "What is refused, and in which words:", "", *(f"- {line}" for line in refused), TAIL]
    return "\n".join([HEAD + first, *lines, *told])


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
