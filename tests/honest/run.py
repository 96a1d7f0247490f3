"""Run honest programs, each in a process of its own: ``python -m tests.honest.run [NAME ...]``.

The parent imports the libraries once and forks; two processes run at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from fastdp.bench.record import insert, parser_of, write

from tests.pretend import pretend_device

from .harness import PROGRAMS, Program, Result, load, run_plainly, run_privately, summary, table

AT_ONCE, LIMIT = 2, 20.0


def _child(chosen: Program, seeds: int, device: torch.device | None, end: Connection) -> None:
    torch.set_num_threads(1)
    if device is not None:
        chosen = chosen.on(device)
    try:
        run_plainly(chosen)
    except BaseException as error:
        result = _failed(chosen, f"without privacy: {type(error).__name__}: {error}")
        if device is not None:
            # It makes tensors of its own on the processor.
            result.outcome, result.ok = "left out", True
        end.send([result])
        return
    end.send([run_privately(chosen, seed, compare=seed == 0) for seed in range(seeds)])


def _failed(chosen: Program, message: str) -> Result:
    return Result(chosen.name, chosen.family, chosen.expect, 0, "crash", message=message.replace("\n", " "))


def run(names: list[str], seeds: int, device: torch.device | None = None) -> list[dict[str, Any]]:
    """Rows of the table, in the programs' order; a program that takes longer than `LIMIT` seconds a seed has crashed."""
    context = multiprocessing.get_context("fork")
    waiting, running, rows = list(names), {}, {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            chosen = PROGRAMS[waiting.pop(0)]
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(chosen, seeds, device, there))
            process.start()
            there.close()
            running[here] = chosen, process, time.monotonic() + LIMIT * (seeds + 1)
        ready = wait(list(running), timeout=1.0)
        for here, (chosen, process, deadline) in list(running.items()):
            if here not in ready and time.monotonic() < deadline:
                continue
            try:
                results = here.recv() if here in ready else [_failed(chosen, "out of time")]
            except EOFError:
                results = [_failed(chosen, "the process ended")]
            process.kill()
            process.join()
            here.close()
            del running[here]
            rows[chosen.name] = summary(results)
            shown = next((result for result in results if not result.ok), results[0])
            print(shown.line(), flush=True)
    return [rows[name] for name in names]


def main() -> None:
    """Run the programs named, or all, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="programs or families; all without any")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", help="where they train; 'pretend' is the one of tests/pretend")
    parser.add_argument("--document", type=Path, help="page whose table is replaced")
    arguments = parser.parse_args()
    known, device = load(), arguments.device
    chosen = [n for n, p in known.items() if not arguments.names or {n, p.family} & set(arguments.names)]
    if device is not None:
        device = pretend_device() if device == "pretend" else torch.device(device)
        # A trainer chooses where it trains.
        chosen = [name for name in chosen if known[name].family != "trainers"]
    rows = run(chosen, arguments.seeds, device)
    held = sum(row["held"] == row["seeds"] for row in rows)
    print(f"{held} of {len(rows)} programs as expected; routes {dict(Counter(row['route'] for row in rows))}")
    write(arguments.json, rows)
    if arguments.document is not None:
        insert(arguments.document, "\n".join(table(rows)))


if __name__ == "__main__":
    main()
