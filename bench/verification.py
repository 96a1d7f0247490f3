"""What verification costs: `python -m fastdp.bench.verification --json bench/results/cpu/verification.json`.

Processor time of a first step, of the checks in steady steps and of later checks, over that of plain steps in the same
process; and the rows that a first step runs forward and back through the first block, over those of the batch.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

import fastdp
from fastdp.verify import Checks
from fastdp.verify.state import StateCheck

from . import record

#: Width, examples a batch, tokens, layers, vocabulary, and steps that are timed.
CASES = {
    "first step, 12x768, B=8": (768, 8, 128, 12, 50257, 1),
    "first step, 12x64, B=8": (64, 8, 128, 12, 5000, 1),
    "first step, 12x64, B=1": (64, 1, 128, 12, 5000, 1),
    "100 steps, 12x64, B=8": (64, 8, 128, 12, 5000, 100),
}


def measure(width: int, rows: int, tokens: int, layers: int, vocabulary: int, steps: int) -> dict[str, Any]:
    """One GPT-2, plainly and privately on batches of the same size, full tuning with AdamW."""
    ids = torch.randint(3, vocabulary, (8 * rows, tokens))
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]
    plain = _model(width, layers, vocabulary)
    times = [_timed(_step(*plain, {"input_ids": ids[:rows], "labels": ids[:rows]})) for _ in range(4)]
    own = statistics.median(times[1:])
    model, optimizer = _model(width, layers, vocabulary)
    passed = _count_rows(model)
    loader: DataLoader[Any] = DataLoader(data, batch_size=rows)  # type: ignore[arg-type]
    # Shuffled batches are full, so that every step is of one size.
    private = fastdp.make_private(
        model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-4, epochs=1 + steps, sampling="shuffled"
    )
    spent, first, equivalents = _Spent(), 0.0, 0.0
    shares: list[tuple[float, float]] = []
    with spent:
        while len(shares) < steps:
            for batch in private.data_loader:
                spent.seconds = 0.0
                took = _timed(_step(model, optimizer, batch))
                if not first:
                    # A backward pass takes two forward passes' time.
                    first, equivalents = took, (passed["forward"] + 2 * passed["backward"]) / (3 * rows)
                else:
                    shares.append((spent.seconds, took))
                if len(shares) >= steps:
                    break
    private.detach()
    return {
        "plain_step": own,
        "first_step_over_plain": first / own,
        "first_step_forward_backward_equivalents": equivalents,
        "checks_share_of_steady_step": statistics.median(check / took for check, took in shares),
        "checks_share_after_first_step": sum(c for c, _ in shares) / sum(t for _, t in shares),
        "steps": steps,
        "route": private.route,
    }


def _model(width: int, layers: int, vocabulary: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=max(4, width // 64), vocab_size=vocabulary, n_positions=128
    )
    model = transformers.GPT2LMHeadModel(config).train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> Callable[[], None]:
    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _timed(function: Callable[[], None]) -> float:
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


class _Spent:
    """Adds up the processor time of the checks while it is open."""

    seconds = 0.0

    def __enter__(self) -> None:
        names = [(Checks, n) for n in ("before", "after")] + [
            (StateCheck, n) for n in ("require_settled", "settle", "_saved_buffers")
        ]
        self._kept = [(owner, name, getattr(owner, name)) for owner, name in names]
        for owner, name, own in self._kept:
            setattr(owner, name, self._counted(own))

    def __exit__(self, *_: object) -> None:
        for owner, name, own in self._kept:
            setattr(owner, name, own)

    def _counted(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return own(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begin

        return run


def main() -> None:
    parser = record.parser_of(__doc__)
    parser.add_argument("--case", choices=list(CASES), help="one of them")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
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
