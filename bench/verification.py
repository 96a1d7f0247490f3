"""What verification costs: `python -m bench.verification --json bench/results/cpu/verification.json`.

Processor time on one thread. A first step, over plain steps before and after it; the checks of steady steps, each counted once,
over these steps; and steps that run one example at a time (``isolation="per_example"``), in turns with batched and plain ones.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fastdp.verify import Checks
from fastdp.verify.state import StateCheck

from . import record, workloads
from .workloads import Case

FIRST = {
    "gpt2 12x768, B=8, T=128": Case("gpt2", 12, 768, vocabulary=50257, dropout=0.0),
    "gpt2 12x64, B=8, T=128": Case("gpt2", 12, 64, vocabulary=5000, batches=64),
    "gpt2 12x64, B=1, T=128": Case("gpt2", 12, 64, vocabulary=5000, rows=1, batches=64),
    "llama 2x64, B=8, T=32": Case("llama", 2, 64, vocabulary=1000, tokens=32, batches=64),
}
ISOLATED = {
    "gpt2 6x384, B=8, T=128": Case("gpt2", 6, 384),
    "bert 6x384, B=8, T=128": Case("bert", 6, 384),
    "llama 6x384, B=8, T=128": Case("llama", 6, 384, 1024),
    "bert 6x384, B=32, T=16": Case("bert", 6, 384, rows=32, tokens=16),
    "gpt2 2x64, B=8, T=32": Case("gpt2", 2, 64, vocabulary=1000, tokens=32),
}
_CPU = torch.device("cpu")


class _Checking:
    """Adds up the processor time of the outermost check that runs."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0
        for owner, names in ((Checks, ("before", "after")), (StateCheck, ("require_settled", "settle"))):
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))
        watching = Checks.watching

        @contextmanager
        def watch(checks: Checks) -> Iterator[None]:
            watched = watching(checks)
            self._timed(watched.__enter__)()
            yield
            self._timed(watched.__exit__)(None, None, None)

        Checks.watching = watch  # type: ignore[assignment, method-assign]

    def _timed(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begun = time.thread_time()
            try:
                return own(*args, **kwargs)
            finally:
                self._depth -= 1
                self.seconds += 0.0 if self._depth else time.thread_time() - begun

        return run


def _seconds(step: Callable[[], Any]) -> float:
    begun = time.process_time()
    step()
    return time.process_time() - begun


def first_and_steady(case: Case, checking: _Checking, steps: int) -> dict[str, Any]:
    """A first step, and the share that checks have of steady ones; of none for a large model, which plain steps surround."""
    plain = workloads.plain_step(case, workloads.build(case, _CPU), fused=False)
    plain()
    times = [_seconds(plain) for _ in range(3)]
    step: Any = workloads.private_step(case, workloads.build(case, _CPU), fused=False, self_check=True)
    first = _seconds(step)
    times += [_seconds(plain) for _ in range(3)]
    shares, later = [], []
    for _ in range(steps):
        checking.seconds = 0.0
        later.append(_seconds(step))
        shares.append(checking.seconds / later[-1])
    return {
        "plain_step": statistics.median(times),
        "first_step_over_plain": first / statistics.median(times),
        "checks_share_of_steady_step": statistics.median(shares),
        "steady_step": statistics.median(later),
        "route": step.private.route,
    }


def isolated(case: Case, turns: int) -> dict[str, float]:
    """Steps one example at a time and in batches, over plain ones."""
    steps: list[Any] = [workloads.plain_step(case, workloads.build(case, _CPU), fused=False)]
    steps += [
        workloads.private_step(case, workloads.build(case, _CPU), fused=False, self_check=True, isolation=isolation)
        for isolation in (None, "per_example")
    ]
    times = [[_seconds(step) for step in steps] for _ in range(turns + 2)][2:]
    return {
        "isolated_over_batched": statistics.median(own / batched for _, batched, own in times),
        "isolated_over_plain": statistics.median(own / plain for plain, _, own in times),
        "batched_over_plain": statistics.median(batched / plain for plain, batched, _ in times),
        "plain_step": statistics.median(plain for plain, _, _ in times),
    }


def main() -> None:
    options = record.parser_of(__doc__).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in ISOLATED.items():
        found[name] = isolated(case, 5)
        print(name, found[name], flush=True)
    checking = _Checking()
    for name, case in FIRST.items():
        found[name] = first_and_steady(case, checking, 3 if case.width > 64 else 30)
        print(name, found[name], flush=True)
    found["load"] = os.getloadavg()
    record.write(options.json, found)


if __name__ == "__main__":
    main()
