"""What verification costs: `python -m fastdp.bench.verification --json bench/results/cpu/verification.json`.

Processor time of a first step, of the checks in steady steps and of later checks, over that of plain steps in the same
process; and the rows that a first step runs forward and back through the first block, over those of the batch.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fastdp.verify import Checks
from fastdp.verify.state import StateCheck

from . import record, workloads
from .workloads import Case

CPU = torch.device("cpu")
#: A GPT-2 whose parameters are all trained, and how many later steps are timed.
CASES = {
    "first step, 12x768, B=8": (Case("gpt2", 12, 768, vocabulary=50257), 1),
    "first step, 12x64, B=8": (Case("gpt2", 12, 64, heads=4, vocabulary=5000), 1),
    "first step, 12x64, B=1": (Case("gpt2", 12, 64, heads=4, vocabulary=5000, rows=1), 1),
    "100 steps, 12x64, B=8": (Case("gpt2", 12, 64, heads=4, vocabulary=5000), 100),
}


def measure(case: Case, steps: int) -> dict[str, Any]:
    """One model, plainly and privately on batches of the same size."""
    plain = workloads.plain_step(case, workloads.build(case, CPU), fused=False)
    own = statistics.median([_timed(plain) for _ in range(4)][1:])
    model = workloads.build(case, CPU)
    passed = _count_rows(model)
    step: Any = workloads.private_step(case, model, fused=False, self_check=True)
    with _checks_timed() as spent:
        first = _timed(step)
        # A backward pass takes two forward passes' time.
        equivalents = (passed["forward"] + 2 * passed["backward"]) / (3 * case.rows)
        shares: list[tuple[float, float]] = []
        for _ in range(steps):
            spent.clear()
            took = _timed(step)
            shares.append((sum(spent), took))
    step.private.detach()
    return {
        "plain_step": own,
        "first_step_over_plain": first / own,
        "first_step_forward_backward_equivalents": equivalents,
        "checks_share_of_steady_step": statistics.median(check / took for check, took in shares),
        "checks_share_after_first_step": sum(c for c, _ in shares) / sum(t for _, t in shares),
        "steps": steps,
        "route": step.private.route,
    }


def _timed(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def _count_rows(model: Any) -> dict[str, int]:
    """Rows that pass the first block's MLP, forward and backward."""
    passed = {"forward": 0, "backward": 0}

    def forward(_module: Any, inputs: Any, output: torch.Tensor) -> None:
        passed["forward"] += output.shape[0]
        if output.requires_grad:
            output.register_hook(
                lambda gradient: passed.__setitem__("backward", passed["backward"] + gradient.shape[0])
            )

    model.transformer.h[0].mlp.register_forward_hook(forward)
    return passed


@contextlib.contextmanager
def _checks_timed() -> Iterator[list[float]]:
    """Within, the list gets the processor seconds of each call of the checks."""
    spent: list[float] = []

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return own(*args, **kwargs)
            finally:
                spent.append(time.process_time() - begin)

        return run

    with contextlib.ExitStack() as stack:
        for owner, names in (
            (Checks, ("before", "after")),
            (StateCheck, ("require_settled", "settle", "_saved_buffers")),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield spent


def main() -> None:
    parser = record.parser_of(__doc__)
    parser.add_argument("--case", choices=list(CASES), help="one of them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in CASES.items():
            if arguments.case in (None, name):
                found[name] = measure(*case)
                print(
                    name,
                    {key: round(v, 4) if isinstance(v, float) else v for key, v in found[name].items()},
                    flush=True,
                )
    record.write(arguments.json, found)


if __name__ == "__main__":
    main()
