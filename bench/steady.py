"""Steady private steps of this code against those of another checkout: `python -m bench.steady DIR --json FILE`.

DIR holds another commit with its extension built in place. Each code runs in a process of its own, and they take steps in
turns. Figures are processor time of all threads, which leaves out what other programs take of the machine. Processes are
started several times, as the placement of memory alone makes one slower than another by a hundredth.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Four layers of width 256, batches of 8 rows of 128 tokens; verification of later batches is off.
CASES = {
    "gpt2": {"kind": "gpt2"},
    "llama": {"kind": "llama", "feed_forward": 688},
    "gpt2-lora": {"kind": "gpt2", "tuning": "lora"},
    "bert": {"kind": "bert"},
}
_WARM_UP = 3
#: The C library keeps freed memory. What it gives back between steps differs by process: up to 15,000 page faults a step.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


class Worker:
    """A process that takes steps with the code of a checkout."""

    def __init__(self, checkout: Path, case: str, threads: int):
        environment = os.environ | _MEMORY | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", case, str(checkout)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, text=True, cwd=checkout, env=environment, stdin=pipe, stdout=pipe)
        self.take(_WARM_UP)

    def take(self, steps: int) -> float:
        """Processor seconds that so many steps take."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("a step failed: its error is printed above; build the extension of both checkouts")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(checkouts: Sequence[Path], case: str, threads: int, starts: int, turns: int, steps: int) -> dict[str, Any]:
    """Ratios of the first checkout's steps to the second's: of pairs in turn, of medians and of lower quartiles."""
    times: list[list[float]] = [[], []]
    quartiles, medians = [], []
    for start in range(starts):
        # The process that starts first is slower by a hundredth: each checkout is it in every second start.
        order = (0, 1) if start % 2 else (1, 0)
        started = {which: Worker(checkouts[which], case, threads) for which in order}
        workers = [started[0], started[1]]
        found: list[list[float]] = [[], []]
        for turn in range(turns):
            for which in (0, 1) if (turn + start) % 2 else (1, 0):
                found[which].append(workers[which].take(steps) / steps)
        for worker, own, all_times in zip(workers, found, times):
            worker.close()
            all_times += own
        ours, theirs = found
        medians.append(statistics.median(ours) / statistics.median(theirs))
        quartiles.append(statistics.quantiles(ours)[0] / statistics.quantiles(theirs)[0])
    ours, theirs = times
    return {
        "seconds": statistics.median(ours),
        "seconds_before": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs)),
        "ratio_of_medians": statistics.median(medians),
        "ratio_of_lower_quartiles": statistics.median(quartiles),
        "lower_quartiles_by_start": quartiles,
        "pairs": len(ours),
        "steps_a_pair": steps,
    }


def _work(case: str, checkout: str) -> None:
    """Take as many steps as each line of the standard input says, and write their processor seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Run by its path, this file has its own folder first among those that are searched.
    sys.path[0] = checkout
    warnings.simplefilter("ignore")
    import torch

    import fastdp
    from bench import workloads

    if not Path(fastdp.__file__).is_relative_to(checkout):
        raise RuntimeError(f"fastdp was imported from {fastdp.__file__}: build the checkout {checkout} first")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    made = workloads.Case(layers=4, width=256, vocabulary=5000, **CASES[case])  # type: ignore[arg-type]
    step = workloads.private_step(made, workloads.build(made, torch.device("cpu")), fused=False)
    for line in sys.stdin:
        begun = time.process_time()
        for _ in range(int(line)):
            step()
        print(time.process_time() - begun, file=answers, flush=True)


def main() -> None:
    from . import record

    parser = record.parser_of(__doc__)
    parser.add_argument("checkout", type=Path, help="a folder with the other commit, its extension built in place")
    parser.add_argument("--case", choices=list(CASES), action="append", help="some of them")
    for name, default in (("threads", 1), ("starts", 4), ("turns", 16), ("steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    checkouts = [Path(__file__).resolve().parents[1], options.checkout.resolve()]
    before = subprocess.check_output(["git", "-C", checkouts[1], "rev-parse", "HEAD"], text=True).strip()
    found: dict[str, Any] = {"commit_before": before, "threads": options.threads}
    for case in options.case or CASES:
        found[case] = compare(checkouts, case, options.threads, options.starts, options.turns, options.steps)
        print(case, {k: round(v, 4) for k, v in found[case].items() if isinstance(v, float)}, flush=True)
        record.write(options.json, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        _work(*sys.argv[2:])
    else:
        main()
