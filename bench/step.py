"""One training step: non-private, fastdp, and Opacus in both its modes, alternating, on processors each in a process of its own.

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
import multiprocessing
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from . import workloads
from .workloads import LEARNING_RATE, Case

IMPLEMENTATIONS = ("non-private", "fastdp", "opacus-hooks", "opacus-ghost")
FUSED = ("non-private-fused", "fastdp-fused")
#: On a GPU: with fused optimizers alone; ours records CUDA graphs where that is faster, unless it is eager.
ON_A_GPU = (*FUSED, "non-private-captured", "fastdp-eager")
COMPILED_ON_A_GPU = (FUSED[0], "non-private-compiled")
OTHERS_ON_A_GPU = (FUSED[0], "opacus-hooks", "opacus-ghost")
#: Makes the C library give every larger block back when it is freed, instead of keeping it in its heap.
_NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
#: Seconds that steps in a row on a GPU take about, between which the host need not wait.
_IN_A_ROW = 0.5

#: Small programs, as tutorials have them: all but the loader is a few milliseconds.
_small = partial(Case, batches=64)
CASES = {
    "gpt2-6x512-lora": Case("gpt2", 6, 512, tuning="lora"),
    "gpt2-6x512-full": Case("gpt2", 6, 512),
    "llama-6x512-lora": Case("llama", 6, 512, 1376, tuning="lora"),
    "llama-6x512-lora-checkpointed": Case("llama", 6, 512, 1376, tuning="lora", checkpointed=True),
    "llama-6x512-full": Case("llama", 6, 512, 1376),
    "llama-4x256-full-checkpointed": Case("llama", 4, 256, vocabulary=1024, rows=4, checkpointed=True),
    "mixtral-2x256-full": Case("mixtral", 2, 256, 512),
    "qwen3-moe-2x256-full": Case("qwen3-moe", 2, 256, 256),
    "bert-6x384-full": Case("bert", 6, 384),
    "bert-6x384-bitfit": Case("bert", 6, 384, tuning="bitfit"),
    "vit-6x384-full": Case("vit", 6, 384, tokens=197),
    "small-cnn": _small("cnn", 2, 16, rows=16, tokens=16),
    "small-text": _small("words", 2, 64, rows=16, vocabulary=1000, tokens=32),
    "small-text-cnn": _small("text-cnn", 1, 32, rows=16, vocabulary=1000, tokens=32),
    "small-gpt2-lora": _small("gpt2", 2, 64, rows=8, vocabulary=1000, tokens=32, tuning="lora"),
    "small-llama-lora": _small("llama", 2, 64, 128, rows=8, vocabulary=1000, tokens=32, tuning="lora"),
    **workloads.LARGE,
}


def measure(
    case: str, steps: int = 7, warmup: int = 2, implementations: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """Rows of {case, implementation, seconds, peak_bytes, ratio_time, ratio_memory}, or the exception raised.

    Without a choice of implementations all, and where everything is trained those with fused optimizers too.

    Ratios are to non-private in the same run: time by the median of step-by-step ratios, so that a machine whose speed
    drifts is compared with itself. On a processor ``processor_seconds`` leave out what other programs took of the machine, and
    ``ratio_processor`` is of their medians. On a GPU ``seconds`` are those of a step among several in a row, as loops take
    them, and ``waited_seconds`` those of one that the host waits for; ``peak_bytes`` is the peak of tensors since the model was
    built, and ``held_bytes`` what torch holds of the device after all steps, recorded passes and freed blocks with it.

    Raises ValueError for an unknown case.
    """
    if case not in CASES:
        raise ValueError(f"there is no case '{case}'; choose one of {', '.join(CASES)}")
    on_gpu = torch.cuda.device_count() > 0
    if implementations is None:
        every = (*IMPLEMENTATIONS[:2], *(FUSED if CASES[case].tuning == "full" else ()), *IMPLEMENTATIONS[2:])
        # Torch's own way does not record checkpointed passes, which read random states.
        whole = (*FUSED, ON_A_GPU[-1]) if CASES[case].checkpointed else ON_A_GPU
        implementations = whole if on_gpu else every
    measured = _one_by_one if on_gpu else _in_turns
    found = measured(case, implementations, steps, warmup)
    base = found[implementations[0]]
    return [{"case": case, "implementation": name, **_figures(one, base)} for name, one in found.items()]


@dataclass
class _Found:
    """What was seen of one implementation: seconds of its steps, bytes, or why there are none."""

    times: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    peak: int = 0
    held: int = 0
    error: str | None = None


def _figures(one: _Found, base: _Found) -> dict[str, Any]:
    """What a row says of one implementation, and of it over the first."""
    if one.error is not None:
        return {"error": one.error}
    median = statistics.median
    row: dict[str, Any] = {"seconds": median(one.times), "peak_bytes": one.peak}
    if one.waited:
        row |= {"waited_seconds": median(one.waited), "held_bytes": one.held}
    else:
        row["processor_seconds"] = median(one.processor)
    if base.error is not None:
        return row
    row["ratio_time"] = median(a / b for a, b in zip(one.times, base.times))
    row["ratio_memory"] = one.peak / base.peak
    if one.waited:
        return row | {"ratio_waited": median(one.waited) / median(base.waited), "ratio_held": one.held / base.held}
    return row | {"ratio_processor": median(one.processor) / median(base.processor)}


def _one_by_one(case: str, implementations: tuple[str, ...], steps: int, warmup: int) -> dict[str, _Found]:
    """On a GPU, which holds one model at a time and keeps its speed, in one process, which has imported everything once."""
    global _resident
    found = {}
    for name in implementations:
        if _resident is None or _resident.error is not None:
            _resident = _Worker({})
        worker = _resident
        worker.ask(_make, case, name)
        for _ in range(warmup + 2):
            worker.ask(_take)
        waited = [worker.ask(_take) for _ in range(steps)]
        row = max(4, min(32, round(_IN_A_ROW / max(statistics.median(waited), 1e-3))))
        times = [worker.ask(_take, row) / row for _ in range(3)]
        held = worker.ask(torch.cuda.memory_reserved)
        found[name] = _Found(times, waited=waited, peak=worker.ask(_peak), held=held, error=worker.error)
        if found[implementations[0]].error is not None:
            break  # what ordinary training cannot hold, nothing else does
    return found


_resident: _Worker | None = None


def _in_turns(case: str, implementations: tuple[str, ...], steps: int, warmup: int) -> dict[str, _Found]:
    """Processors drift, so there implementations take turns, each in a process of its own."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(closing(_Worker({}))) for name in implementations}
        for name, worker in workers.items():
            worker.ask(_make, case, name)
        for _ in range(warmup):
            for worker in workers.values():
                worker.ask(_take)
        found = {name: _Found() for name in workers}
        for _ in range(steps):
            for name, worker in workers.items():
                found[name].times.append(worker.ask(_take))
                found[name].processor.append(worker.ask(_spent))
        for name, worker in workers.items():
            found[name].error = worker.error
    for name, one in found.items():
        if one.error is None:
            one.peak = _peak_alone(case, name)
    return found


def _peak_alone(case: str, implementation: str) -> int:
    with closing(_Worker(_NO_HEAP)) as worker:
        worker.ask(_make, case, implementation)
        worker.ask(_take, 3)
        return worker.ask(_peak)


class _Worker:
    """A process that has imported everything, and builds a step and takes it when it is asked to; none once it has failed."""

    def __init__(self, environment: Mapping[str, str]):
        self.error: str | None = None
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        with mock.patch.dict(os.environ, environment):
            self._process.submit(os.getpid).result()
        self.ask(_begin)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of this module says there; 0 after an error."""
        if self.error is not None:
            return 0.0
        try:
            return self._process.submit(function, *arguments).result()
        except Exception as error:
            self.error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
            self.close()
            return 0.0

    def close(self) -> None:
        self._process.shutdown()


#: In such a process: the step, and the most memory that it had used when that was begun to be built.
_step: Callable[[], None] | None = None
_start = 0
#: Processor time of the latest steps, of all threads.
_processor = 0.0


def _begin() -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("ignore")
    import opacus  # noqa: F401
    import peft  # noqa: F401
    import transformers

    from fastdp import make_private  # noqa: F401

    transformers.logging.set_verbosity_error()


def _make(case: str, implementation: str) -> None:
    """Let go of the step before, and build another."""
    global _start, _step
    _step = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _step = _build(CASES[case], implementation)


def _take(count: int = 1) -> float:
    """Seconds of so many steps in a row."""
    global _processor
    assert _step is not None
    begun, worked = time.perf_counter(), time.process_time()
    for _ in range(count):
        _step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    _processor = time.process_time() - worked
    return time.perf_counter() - begun


def _spent() -> float:
    return _processor


def _peak() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - _start


def _build(case: Case, implementation: str) -> Callable[[], Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = workloads.build(case, device)
    if implementation.startswith("fastdp"):
        capture = False if implementation == "fastdp-eager" else "auto"
        return workloads.private_step(case, model, fused=implementation != "fastdp", capture=capture)
    if implementation == "non-private-captured":
        return workloads.captured_step(case, model)
    if implementation == "non-private-compiled":
        return workloads.plain_step(case, torch.compile(model), fused=True)  # type: ignore[arg-type]
    if implementation in ("non-private", "non-private-fused"):
        return workloads.plain_step(case, model, fused=implementation == "non-private-fused")
    batches = workloads.batches(workloads.loader_of(case, shuffle=True), device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    return _opacus(case, model, optimizer, batches, ghost=implementation == "opacus-ghost")


def _opacus(
    case: Case, model: torch.nn.Module, optimizer: Any, batches: Iterator[dict[str, torch.Tensor]], *, ghost: bool
) -> Callable[[], None]:
    from opacus import PrivacyEngine

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
