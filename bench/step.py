"""One training step: non-private, fastdp, and Opacus in both its modes, alternating, each in a process of its own.

A step is a batch of fixed size from a loader, forward, backward and `optimizer.step()` of torch's AdamW, with clipping and
noise where the implementation has them. Where all is trained the update counts, so there the non-private step also runs
with torch's fused AdamW, and ours with `fastdp.optim.AdamW`, which fuses noise and update. Peak memory counts from after
the imports, so it holds data, model, optimizer and step.

On a processor memory is measured in processes of its own, whose C library gives freed blocks back to the system: what
it finds is what was in use at once. In the timed processes the library keeps freed blocks in a heap with holes; their
peak is reported beside it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from . import layers, workloads
from .memory import ENVIRONMENT
from .workloads import LEARNING_RATE, Case

IMPLEMENTATIONS = ("non-private", "fastdp", "opacus-hooks", "opacus-ghost")
FUSED = ("non-private-fused", "fastdp-fused")


CASES = {
    "gpt2-6x512-lora": Case("gpt2", 6, 512, tuning="lora"),
    "gpt2-6x512-full": Case("gpt2", 6, 512),
    "llama-6x512-lora": Case("llama", 6, 512, 1376, tuning="lora"),
    "llama-6x512-full": Case("llama", 6, 512, 1376),
    "bert-6x384-full": Case("bert", 6, 384),
    "bert-6x384-bitfit": Case("bert", 6, 384, tuning="bitfit"),
    "vit-6x384-full": Case("vit", 6, 384, tokens=197),
    "cnn": Case("cnn", 3, 32, rows=32, tokens=32),
    "cnn-gn": Case("cnn-gn", 3, 32, rows=32, tokens=32),
    "cnn-in": Case("cnn-in", 3, 32, rows=32, tokens=32),
    "depthwise": Case("depthwise", 3, 32, rows=32, tokens=32),
    "conv3d": Case("conv3d", 3, 16, rows=16, tokens=16),
    "text-cnn": Case("text-cnn", 1, 64, rows=32, vocabulary=5000),
    "bags": Case("bags", 1, 128, rows=32, vocabulary=5000),
    "gru": Case("gru", 1, 128, rows=32, vocabulary=5000),
    "rnn": Case("rnn", 1, 128, rows=32, vocabulary=5000),
    "attention": Case("attention", 1, 256, rows=16, vocabulary=5000),
    "lstm": Case("lstm", 1, 128, rows=32, vocabulary=5000),
    "encoder-layer": Case("encoder-layer", 2, 256, rows=16, vocabulary=5000),
    "gpt2-124m-lora": Case("gpt2", 12, 768, tuning="lora", tokens=1024, vocabulary=50257, dtype=torch.bfloat16),
    "gpt2-124m-full": Case("gpt2", 12, 768, tokens=1024, vocabulary=50257, dtype=torch.bfloat16),
    "bert-base-full": Case("bert", 12, 768, rows=32, vocabulary=30522, dtype=torch.bfloat16),
    "llama-1b-full": Case("llama", 16, 2048, rows=4, tokens=1024, vocabulary=128256, dtype=torch.bfloat16),
    "llama-8b-lora": Case(
        "llama", 32, 4096, tuning="lora", rows=4, tokens=1024, vocabulary=128256, dtype=torch.bfloat16
    ),
}


def measure(
    case: str, steps: int = 7, warmup: int = 2, implementations: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """Rows of {case, implementation, seconds, peak_bytes, ratio_time, ratio_memory}, or the exception raised.

    Without a choice of implementations all, and where everything is trained those with fused optimizers too.

    Ratios are to non-private in the same run: time by the median of step-by-step ratios, so that a machine whose speed
    drifts is compared with itself. On a processor ``heap_bytes`` and ``ratio_heap`` are those of the timed processes.

    Raises ValueError for an unknown case.
    """
    if case not in CASES:
        raise ValueError(f"there is no case '{case}'; choose one of {', '.join(CASES)}")
    if implementations is None:
        # Other libraries last: what time is short of, on a GPU that is lent, is theirs.
        implementations = (*IMPLEMENTATIONS[:2], *(FUSED if CASES[case].tuning == "full" else ()), *IMPLEMENTATIONS[2:])
    on_gpu = torch.cuda.is_available()
    workers: dict[str, _Worker] = {}
    heaps: dict[str, int] = {}
    # A GPU holds one model at a time and keeps its speed; processors drift, so there implementations take turns.
    for together in [[name] for name in implementations] if on_gpu else [implementations]:
        with ExitStack() as stack:
            here = {name: stack.enter_context(_Worker(case, name, os.environ)) for name in together}
            for _ in range(warmup):
                for worker in here.values():
                    worker.ask("step")
            for _ in range(steps):
                for worker in here.values():
                    worker.times.append(worker.ask("step"))
            heaps |= {name: worker.ask("peak") for name, worker in here.items()}
        workers |= here
    peaks = heaps if on_gpu else {name: _peak_alone(case, name) for name, w in workers.items() if w.error is None}
    base = workers["non-private"]
    rows = []
    for name, worker in workers.items():
        row: dict[str, Any] = {"case": case, "implementation": name}
        if worker.error is not None:
            row["error"] = worker.error
        else:
            row["seconds"] = statistics.median(worker.times)
            row["peak_bytes"] = peaks[name]
            row["ratio_time"] = statistics.median(a / b for a, b in zip(worker.times, base.times))
            row["ratio_memory"] = peaks[name] / peaks["non-private"]
            if not on_gpu:
                row["heap_bytes"] = heaps[name]
                row["ratio_heap"] = heaps[name] / heaps["non-private"]
        rows.append(row)
    return rows


def _peak_alone(case: str, implementation: str) -> int:
    with _Worker(case, implementation, os.environ | ENVIRONMENT) as worker:
        for _ in range(3):
            worker.ask("step")
        return worker.ask("peak")


class _Worker:
    def __init__(self, case: str, implementation: str, environment: Mapping[str, str]):
        self.times: list[float] = []
        self.error: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, case, implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=dict(environment),
        )
        self.ask(None)

    def ask(self, word: str | None) -> Any:
        """Send a word and wait for the answer; after an error nothing is sent any more."""
        if self.error is not None:
            return 0.0
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if word is not None:
                self.process.stdin.write(word + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "the process ended without an answer"}
        self.error = answer.get("error")
        return answer.get("value", 0.0)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def _build(case: Case, implementation: str) -> Callable[[], None]:
    """A function that takes one training step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = workloads.build(case, device)
    if implementation in ("fastdp", "fastdp-fused"):
        return workloads.private_step(case, model, fused=implementation == "fastdp-fused")
    if implementation in ("non-private", "non-private-fused"):
        return workloads.plain_step(case, model, fused=implementation == "non-private-fused")
    batches = workloads.batches(workloads.loader_of(case, shuffle=True), device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    return _opacus(case, model, optimizer, batches, ghost=implementation == "opacus-ghost")


def _opacus(
    case: Case,
    model: torch.nn.Module,
    optimizer: Any,
    batches: Iterator[dict[str, torch.Tensor]],
    *,
    ghost: bool,
) -> Callable[[], None]:
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    if case.kind in layers.KINDS and layers.KINDS[case.kind].replaced:
        # Its own layer, with the weights of torch's.
        optimizer_class, model = type(optimizer), ModuleValidator.fix(model)
        optimizer = optimizer_class(model.parameters(), lr=LEARNING_RATE)
    engine = PrivacyEngine()
    criterion = torch.nn.CrossEntropyLoss()
    options = {"grad_sample_mode": "ghost", "criterion": criterion} if ghost else {}
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=workloads.loader_of(case),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )
    private, private_optimizer = made[0], made[1]

    def step() -> None:
        batch = next(batches)
        if not ghost:
            private(**batch).loss.backward()
        else:
            labels = batch.pop("labels")
            logits = private(**batch).logits
            if logits.dim() == 3:
                logits, target = logits[:, :-1].flatten(0, 1), labels[:, 1:]
                loss = made[2](logits, target.flatten(), shape=target.shape)
            else:
                loss = made[2](logits, labels)
            loss.backward()
        private_optimizer.step()
        private_optimizer.zero_grad()

    return step


def _peak(start: int) -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start


def _serve(case: str, implementation: str) -> None:
    """Answer the parent's words, a JSON line each."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        import opacus  # noqa: F401
        import peft  # noqa: F401
        import transformers

        import fastdp  # noqa: F401

        transformers.logging.set_verbosity_error()
        gc.collect()
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        step = _build(CASES[case], implementation)
        answer(value=0.0)
        for line in sys.stdin:
            if line.strip() == "peak":
                answer(value=_peak(start))
                continue
            begun = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            answer(value=time.perf_counter() - begun)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
