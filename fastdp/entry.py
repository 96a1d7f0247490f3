"""`make_private`: joins a model, an optimizer and a loader to a method, its budget and its ledger."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdp.engine.engine import Engine
from fastdp.engine.policy import Policy
from fastdp.methods.dpsgd import DPSGD
from fastdp.ops.stream import NoiseStream
from fastdp.private.checks import check_budget, check_model, refuse_frozen
from fastdp.private.method import Preparation, Schedule
from fastdp.private.opening import fingerprint, opened_ledger
from fastdp.private.release import Release
from fastdp.private.run import Private, refuse_driven
from fastdp.private.sampler import (
    PoissonSampler,
    PrivateLoader,
    Sampler,
    ShuffledSampler,
    Units,
    check_loader,
    steps_per_epoch,
)
from fastdp.private.stages import Stages


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    method: Any = None,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: float | None = None,
    noise_multiplier: float | None = None,
    max_physical_batch_size: int | None = None,
    sampling: str = "poisson",
    adjacency: str = "add_remove",
    user_ids: Sequence[Hashable] | None = None,
    max_examples_per_user: int | None = None,
    unit_map: str | None = None,
    loss_reduction: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    secure_rounding: bool = False,
    two_pass: bool | None = None,
    self_check: bool = True,
    unsafe_seed: int | None = None,
) -> Private:
    """Make training private: the same model and optimizer objects, and a loader to iterate over instead.

    Args:
        model: its parameters with ``requires_grad`` are trained; its forward returns the loss (or see loss_reduction).
        optimizer: any `torch.optim.Optimizer` over those parameters.
        data_loader: its ``batch_size`` is the logical batch size (in users with ``user_ids``), its data set must have a
            length; the sampler is replaced.
        method: `fastdp.DPSGD` (default), or another method's settings.
        target_epsilon: budget to calibrate the noise for; inf means no noise. Or give noise_multiplier.
        target_delta: failure probability of the guarantee, below 1/N.
        epochs: passes over the data that the budget must last for; ceil(N / B) logical steps each.
        noise_multiplier: noise standard deviation over sensitivity; 0 means no privacy, and the card says so.
        max_physical_batch_size: most examples in one forward pass; memory, not privacy.
        sampling: "poisson", or "shuffled" (accounted without amplification).
        adjacency: "add_remove" or "replace_one".
        user_ids: the user of each example, to protect users instead of examples.
        max_examples_per_user: examples of one user that are used, with user_ids.
        unit_map: for collators that pack rows, the batch entry naming the example of every token.
        loss_reduction: "mean" or "sum", for a criterion outside the model; the model then need not return a loss.
        output_dir: where the ledger is kept; None keeps it in memory, and a crash forgets it.
        resume: continue the ledger found in output_dir.
        secure_rounding: noise in the form that resists floating-point attacks.
        two_pass: run backward twice and keep no activations' factors; None: when gradient checkpointing is on.
        self_check: compare the first batch with one-at-a-time autograd before anything is released.
        unsafe_seed: makes sampling and noise reproducible, which protects nothing; for tests.

    Raises:
        ValueError, TypeError: for what cannot be made private, before any budget is spent.
    """
    method = DPSGD() if method is None else method
    refuse_driven(model, optimizer)
    check_model(model, optimizer)
    check_loader(data_loader)
    if sampling not in ("poisson", "shuffled"):
        raise ValueError(f"sampling is '{sampling}': use 'poisson' or 'shuffled'")
    if adjacency not in ("add_remove", "replace_one"):
        raise ValueError(f"adjacency is '{adjacency}': use 'add_remove' or 'replace_one'")
    if loss_reduction not in (None, "mean", "sum"):
        raise ValueError(
            f"loss_reduction is '{loss_reduction}': use 'mean' or 'sum', or None if the model returns its loss"
        )
    if epochs is None or not (epochs > 0 and math.isfinite(epochs)):
        raise ValueError(f"epochs is {epochs}: state how many passes over the data the budget must last for")
    size = len(data_loader.dataset)  # type: ignore[arg-type]
    units = Units(size, user_ids, max_examples_per_user)
    batch_size = int(data_loader.batch_size or 1)
    if batch_size > len(units):
        raise ValueError(f"batch size {batch_size} exceeds the {len(units)} units: the sample rate would pass 1")
    physical = max_physical_batch_size or max(batch_size, units.largest)
    if physical < units.largest:
        raise ValueError(
            f"a user has up to {units.largest} examples but max_physical_batch_size is {physical}: raise it, or lower "
            "max_examples_per_user"
        )
    per_epoch = steps_per_epoch(len(units), batch_size)
    steps = math.ceil(epochs * per_epoch)
    sample_rate = batch_size / len(units)
    check_budget(target_delta, target_epsilon, noise_multiplier, method.mechanism, len(units))

    schedule = Schedule(
        units=len(units),
        batch_size=batch_size,
        steps=steps,
        steps_per_epoch=per_epoch,
        sampling=sampling,
        adjacency=adjacency,
        target_epsilon=target_epsilon,
        delta=target_delta,
        noise_multiplier=noise_multiplier,
    )
    budget = method.budget(schedule)
    sigma = budget.noise_multiplier
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Made once here for its refusals, before a ledger exists.
    method.policy(trained, sigma, {})
    if method.freezes:
        refuse_frozen(model, optimizer)
    if method.bias_correction and not hasattr(optimizer, "noise_variance"):
        raise ValueError(
            "bias_correction needs fastdp.optim.Adam or fastdp.optim.AdamW: other optimizers cannot apply it"
        )
    settings = {
        "noise_multiplier": sigma,
        "sample_rate": sample_rate,
        "steps_per_epoch": per_epoch,
        "sampling": sampling,
        "adjacency": adjacency,
        "unit": "example" if user_ids is None else f"user (at most {max_examples_per_user} examples)",
        "dataset_size": len(units),
        "delta": target_delta,
        "target_epsilon": target_epsilon,
        "fingerprint": fingerprint(trained),
    }
    with opened_ledger(output_dir, resume, settings, method, schedule, budget) as ledger:
        open_stream = _streams(unsafe_seed)
        noise, draws = open_stream(), open_stream()
        sampler: Sampler = (
            PoissonSampler(len(units), sample_rate, draws)
            if sampling == "poisson"
            else ShuffledSampler(len(units), batch_size, draws)
        )
        loader = PrivateLoader(data_loader, sampler, units, per_epoch, physical, lambda: steps, unit_map)
        release = Release(trained, ledger, noise, batch_size, secure_rounding=secure_rounding)

        def open_engine(policy: Policy) -> Engine:
            return Engine(
                model, policy, loader.tickets, loss_reduction=loss_reduction, two_pass=two_pass, check=self_check
            )

        def open_sample(rate: float) -> PrivateLoader:
            once = PoissonSampler(len(units), rate, open_stream())
            return PrivateLoader(data_loader, once, units, 1, physical, lambda: 1, unit_map)

        def open_preparation() -> Preparation:
            return Preparation(
                model=model,
                parameters=trained,
                step=ledger.spent_steps,
                batch_size=batch_size,
                units=len(units),
                noise_multiplier=sigma,
                budget=budget,
                stream=open_stream(),
                record=ledger.record,
                outcome=stages.outcome,
                open_loader=open_sample,
                returns_loss=loss_reduction is None,
                secure_rounding=secure_rounding,
            )

        folder = None if output_dir is None else Path(output_dir)
        stages = Stages(model, optimizer, method, sigma, release, open_engine, folder, resume and folder is not None)
        return Private(model, optimizer, loader, stages, ledger, settings, open_preparation)


def _streams(unsafe_seed: int | None) -> Callable[[], NoiseStream]:
    """Opens one stream after another, each with a key of its own."""
    if unsafe_seed is None:
        return NoiseStream
    seed = int(unsafe_seed)
    seeds = itertools.chain((2 * seed, 2 * seed + 1), itertools.count((seed + 1) << 64))
    return lambda: NoiseStream.unsafe_reproducible(next(seeds))
