"""A training step that is not run: the real engine on tensors without data, at the real size, each of its operations priced.

The model, the engine and the launchers of the kernels run as they are, on torch's ``meta`` device: shapes, routes, calls and
lifetimes of tensors are those of a GPU, and nothing is computed. Every operation is priced by
``max(bytes / bandwidth, operations / rate, launches x the time of one)`` with the table below, so that what comes out is an
estimate that rests on that table, never a measurement: it is called *simulated* wherever it appears. What is exact are the
counts: launches, bytes allocated, and that nothing in a step waits for the device, which raises here.

    fastdp bench simulate --case llama-8b-lora --gpu h100
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from . import workloads
from .meter import GPUS, META, PER_DOUBLE_ROUND, PER_NORMAL, PER_UPDATE, Gpu, Tally, simulated
from .workloads import Case

CASES = workloads.LARGE | {
    "llama-8b-lora-checkpointed-16x2048": dataclasses.replace(workloads.LARGE["llama-8b-lora-checkpointed"], rows=16),
    "llama-8b-qlora-checkpointed": dataclasses.replace(workloads.LARGE["llama-8b-lora-checkpointed"], four_bits=True),
    "bert-base-poisson": dataclasses.replace(workloads.LARGE["bert-base-full"], logical=256, batches=32),
}
#: What a row holds of a step, and of a private one over a plain one.
_RATIOS = {"seconds": "seconds", "captured": "captured_seconds", "launches": "launches", "memory": "peak_bytes"}
_FIGURES = ("backward_passes", "microbatches", *_RATIOS.values(), "bytes", "operations")
#: Logical batches that a case's figures are means of, where they are drawn by Poisson sampling.
_DRAWS = 8
#: What a run says of padding its microbatches.
_PADS = "fastdp.private.owner.RunOwner.records_passes"


def build(case: Case, device: torch.device = META) -> torch.nn.Module:
    """The case's model, without data unless a device is named."""
    return workloads.build(case, device)


def step_of(case: Case, device: torch.device, *, private: bool, **options: Any) -> Callable[[], int]:
    """A function that takes one training step, in the fused forms of AdamW: torch's, or ours with its noise.

    Options are those of `workloads.private_step`, for a private step.
    """
    model = build(case, device)
    if private:
        return workloads.private_step(case, model, fused=True, **options)
    return workloads.plain_step(case, model, fused=True)


def measure(name: str, gpu: str, noise_rounds: int = 20, two_pass: bool | None = None) -> list[dict[str, Any]]:
    """Rows of a case on one GPU, plain and private, each marked as simulated, with private over plain.

    Args:
        noise_rounds: of private steps' noise, as `fastdp.make_private` takes it.
        two_pass: of private steps, as `fastdp.make_private` takes it.

    Raises:
        ValueError: an unknown case or GPU, or rounds that noise cannot have.
        HostWaits: a step in which the host waits for the device.
    """
    if name not in CASES:
        raise ValueError(f"there is no case '{name}'; choose one of {', '.join(CASES)}")
    if gpu not in GPUS:
        raise ValueError(f"there is no price list for '{gpu}'; choose one of {', '.join(GPUS)}")
    case, priced, rows = CASES[name], GPUS[gpu], []
    base = tally(case, priced, private=False)
    for private in (False, True):
        found = tally(case, priced, private=True, noise_rounds=noise_rounds, two_pass=two_pass) if private else base
        row = {"case": name, "gpu": priced.name, "simulated": True, "step": "private" if private else "plain"}
        row |= {"noise_rounds": noise_rounds} if private else {}
        row |= {figure: getattr(found, figure) for figure in _FIGURES}
        row["first_peak_bytes"] = first_peak(case, priced, private=private)
        row |= {f"ratio_{key}": getattr(found, figure) / getattr(base, figure) for key, figure in _RATIOS.items()}
        rows.append(row | {"dearest": {key: value / 1e9 for key, value in found.spent.most_common(6)}})
    return rows


def prices() -> dict[str, Any]:
    return {kind: dataclasses.asdict(gpu) for kind, gpu in GPUS.items()} | {
        "words_a_normal": PER_NORMAL,
        "words_an_update": PER_UPDATE,
        "words_a_double_round": PER_DOUBLE_ROUND,
    }


def tally(case: Case, gpu: Gpu, *, private: bool, granularity: int = 512, **options: Any) -> Tally:
    """What the third step comes to, with options as of `step_of`; of logical batches that are drawn, a mean of several.

    The first step prepares, and by the third the optimizer's state is there. Microbatches of draws are padded to one size, as
    they are where passes are recorded.
    """
    times = _DRAWS if private and case.logical else 1
    with simulated(gpu, granularity) as meter, mock.patch(_PADS, bool(case.logical)):
        step: Any = step_of(case, META, private=private, **options)
        step()
        step()
        with meter.measuring() as found:
            for _ in range(times):
                found.microbatches += step()
    if private:
        found.backward_passes = step.private.backward_passes
    return found.mean(times)


def first_peak(case: Case, gpu: Gpu, *, private: bool, granularity: int = 512) -> int:
    """The most bytes in the first step, where a private one has its model traced and checked in the way of every run."""
    with simulated(gpu, granularity) as meter:
        step = step_of(case, META, private=private, self_check=True)
        meter.peak = meter.live
        step()
    return meter.peak


def real_peak(case: Case, *, private: bool) -> int:
    """Bytes by which memory grows within a step that is really run, on the processor, as torch's own profiler saw them."""
    from torch.profiler import ProfilerActivity, profile

    from fastdp.ops import routes

    same = {("cpu", width): value for (kind, width), value in routes.DEFAULTS.items() if kind == "cuda"}
    with mock.patch.dict(routes.DEFAULTS, same):
        step = step_of(case, torch.device("cpu"), private=private)
        step()
        step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
