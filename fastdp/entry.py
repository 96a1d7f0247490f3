"""`make_private`: joins a model, an optimizer and a loader to a method, its budget and its ledger."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdp.accounting import Ledger
from fastdp.distributed.ranks import Ranks, alone
from fastdp.engine.engine import Engine
from fastdp.engine.policy import Policy
from fastdp.methods.dpsgd import DPSGD
from fastdp.ops.stream import ROUNDS, NoiseStream
from fastdp.private.checks import (
    bare,
    check_budget,
    check_model,
    described,
    refuse_accumulation,
    refuse_capture,
    refuse_frozen,
    refuse_fused_loss,
    refuse_in_pieces,
    refuse_made_of_examples,
    refuse_repeats,
)
from fastdp.private.graphs import Graphs
from fastdp.private.loader import PrivateLoader, check_loader
from fastdp.private.method import Method
from fastdp.private.observer import Observer
from fastdp.private.plan import Budget, Plan, SideRelease, fingerprint
from fastdp.private.preparation import Access
from fastdp.private.release import Books, Release
from fastdp.private.run import Criterion, Private, refuse_driven
from fastdp.private.sampler import Units, steps_per_epoch
from fastdp.private.schedules import refuse_seeing
from fastdp.private.stages import Stages
from fastdp.private.steps import refuse_warm
from fastdp.verify import Checks

#: Methods that are no argument of `make_private`, and how each is used.
_LOCAL = {
    "EWFT": "call fastdp.EWFT(model, ...) and train the model as ever, with an ordinary optimizer and loader",
    "TextPrivatizer": "call fastdp.TextPrivatizer(model, eta=...) on the texts, and train on what it returns",
    "SelectivePerturbation": "call fastdp.SelectivePerturbation(...) on the texts, and train on what it returns",
}


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
    adjacency: str | None = None,
    user_ids: Sequence[Hashable] | None = None,
    max_examples_per_user: int | None = None,
    unit_map: str | None = None,
    loss_reduction: str | None = None,
    criterion: Criterion | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
    secure_rounding: bool = True,
    noise_rounds: int = 20,
    two_pass: bool | None = None,
    self_check: bool = True,
    isolation: str | None = None,
    keep_logits: bool | None = None,
    capture: bool = False,
    unsafe_seed: int | None = None,
    allow_large_delta: bool = False,
) -> Private:
    """Make training private: the same model and optimizer objects, and a loader to iterate over instead.

    Args:
        model: its parameters with ``requires_grad`` are trained; its forward returns the loss (or see loss_reduction). In a
            process group each process gives its own, all alike (docs/scaling.md).
        optimizer: any `torch.optim.Optimizer` over those parameters.
        data_loader: its ``batch_size`` is the logical batch size (in users with ``user_ids``), its data set must have a
            length; the sampler is replaced. That of an earlier run is taken for the loader which that run was given.
        method: `fastdp.DPSGD` (default), or another method's settings.
        target_epsilon: budget to calibrate the noise for; inf means no noise. Or give noise_multiplier.
        target_delta: failure probability of the guarantee, below 1/N.
        epochs: passes over the data that the budget must last for; ceil(N / B) logical steps each.
        noise_multiplier: noise standard deviation over sensitivity; 0 means no privacy, and the card says so.
        max_physical_batch_size: most examples in one forward pass; memory, not privacy. Without it every logical batch is one
            batch of the loader, however many examples are drawn.
        sampling: "poisson", or "shuffled" (accounted without amplification).
        adjacency: "add_remove" (default, with Poisson sampling), "replace_one", or "zero_out": a unit that is left out leaves
            its place empty (default, with shuffled batches, which know no "add_remove").
        user_ids: the user of each example, to protect users instead of examples.
        max_examples_per_user: examples of one user that are used, with user_ids.
        unit_map: for collators that pack rows, the batch entry naming the example of every token.
        loss_reduction: "mean" or "sum", for a criterion outside the model; the model then need not return a loss. After its
            first batch the loader hands out three small ones of weight 0, which verify the criterion.
        criterion: (output, batch) -> one loss a row ``[rows]``, for a loss outside the model; the loop then takes
            ``private.loss(output, batch)``.
        output_dir: where the ledger is kept; None keeps it in memory, and a crash forgets it.
        resume: continue the ledger found in output_dir.
        secure_rounding: round what is noised to a grid, exactly (docs/noise.md); without it the low bits of exact weights
            may tell what rounding did to a sum.
        noise_rounds: of ChaCha, which draws the noise of training steps: 20, or 12, which a GPU draws faster (docs/noise.md), and
            of counts that adaptive bounds follow. The sampling, and releases of a method's own, have 20 always.
        two_pass: run backward twice and keep no activations' factors; None: when gradient checkpointing is on.
        self_check: verify the first batch, longer ones, and later ones by a public schedule (docs/audit.md): that an example's
            loss and gradient are what they are alone. Without it the card says that this was assumed.
        isolation: "per_example" hands out and runs one example at a time, so that no example can reach another in the model
            or collator. It takes 2 to 3 times as long; use it for code that nobody reviewed.
        keep_logits: True lets the loop read ``output.logits`` of a large vocabulary beside the loss. False never computes them as
            a whole, which saves three times their memory, and takes up to 2.5 times as long for a trained head whose rows are
            shorter than twice its width. None: they are left out where that takes no longer, on processors.
        capture: on a GPU, record micro-batches whose shapes come again as CUDA graphs and replay them, which frees the host: for
            batches padded to one length. What the model's Python code decides is then decided once; a batch of another shape, or
            one that is checked, goes the ordinary way. Tensors beside the loss hold until the next micro-batch.
        unsafe_seed: makes sampling and noise reproducible, which protects nothing; for tests.
        allow_large_delta: take a target_delta of 1/N or more, which allows publishing a whole example.

    Raises:
        ValueError, TypeError: for what cannot be made private, before any budget is spent.

    >>> import torch, fastdp
    >>> model, rows = torch.nn.Linear(3, 1), [(torch.ones(3), torch.ones(1))] * 100
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=20)
    >>> private = fastdp.make_private(
    ...     model, optimizer, loader, target_epsilon=8.0, target_delta=1e-3, epochs=1, loss_reduction="mean"
    ... )
    >>> for x, y in private.data_loader:
    ...     torch.nn.functional.mse_loss(model(x), y).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> private.steps_done, 7.5 < private.epsilon() <= 8
    (5, True)
    """
    ranks = Ranks.here()
    given = optimizer
    with ranks.together():
        # accelerate's wrapper has no hooks of its own.
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            refuse_accumulation(optimizer)
            optimizer = inner
        model = bare(model)
        method = _central(DPSGD() if method is None else method)
        refuse_driven(model, optimizer)
        refuse_warm(optimizer)
        check_model(model, optimizer)
        refuse_made_of_examples(model)
        if isinstance(data_loader, PrivateLoader):
            data_loader = data_loader.given
        batch_size = check_loader(data_loader)
        if unit_map is not None and (loss_reduction is not None or criterion is not None):
            raise ValueError(
                "a criterion outside the model cannot be tried on packed rows, which share tensors: let the model return its own "
                "loss, or leave unit_map out and give every example a row"
            )
        if loss_reduction not in (None, "mean", "sum"):
            raise ValueError(
                f"loss_reduction is '{loss_reduction}': use 'mean' or 'sum', or None if the model returns its loss"
            )
        if noise_rounds not in ROUNDS:
            raise ValueError(
                f"noise_rounds is {noise_rounds!r}: noise has 20 rounds of ChaCha, or 12 where that is asked for"
            )
        if criterion is not None:
            if loss_reduction is not None:
                raise ValueError("loss_reduction and criterion are two ways to say one thing; leave loss_reduction out")
            loss_reduction = "mean"
        if loss_reduction is None:
            refuse_fused_loss(model)
        if capture:
            refuse_capture(model, returns_loss=loss_reduction is None)
        if epochs is None or not (epochs > 0 and math.isfinite(epochs)):
            raise ValueError(f"epochs is {epochs}: state how many passes over the data the budget must last for")
        size = len(data_loader.dataset)  # type: ignore[arg-type]
        units = Units(size, user_ids, max_examples_per_user)
        refuse_repeats(data_loader.dataset, units)
        # Without a limit, whatever is drawn is one micro-batch.
        physical = max_physical_batch_size or size
        if isolation is not None:
            if isolation != "per_example":
                raise ValueError(f"isolation is {isolation!r}: use 'per_example', or leave it out")
            if unit_map is not None or capture:
                raise ValueError("isolation='per_example' runs each example alone: leave unit_map and capture out")
            physical = units.largest
        if physical < units.largest:
            raise ValueError(
                f"a user has up to {units.largest} examples but max_physical_batch_size is {physical}: raise it, or lower "
                "max_examples_per_user"
            )
        per_epoch = steps_per_epoch(len(units), batch_size)
        steps = math.ceil(epochs * per_epoch)
        if adjacency is None:
            adjacency = "zero_out" if sampling == "shuffled" else "add_remove"
        plan = Plan(
            units=len(units),
            batch_size=batch_size,
            steps=steps,
            steps_per_epoch=per_epoch,
            sampling=sampling,  # type: ignore[arg-type]
            adjacency=adjacency,  # type: ignore[arg-type]
            target_epsilon=target_epsilon,
            delta=target_delta,
            noise_multiplier=noise_multiplier,
            unit="example" if user_ids is None else f"user (at most {max_examples_per_user} examples)",
            factors=method.noise_factors,
        )
        check_budget(target_delta, target_epsilon, noise_multiplier, method.mechanism, len(units), allow_large_delta)
        plan = plan.settle(method.budget(plan))
        if plan.sigma > 0:
            refuse_seeing(optimizer)
        refuse_in_pieces(model, keep_logits=keep_logits)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Made once here for its refusals, before a ledger exists.
        for factor in {1.0, *(factor for _, factor in plan.factors)}:
            method.policy(trained, plan.sigma * factor, {})
        if method.selects:
            refuse_frozen(model, optimizer)
        for part in method.parts():
            part.check(optimizer)
        folder = None if output_dir is None else Path(output_dir)
    if ranks.size > 1:
        arguments = [
            *(plan, method.describe(), physical, user_ids is None, unit_map, loss_reduction, resume, folder is None),
            *(secure_rounding, noise_rounds, two_pass, self_check, isolation, unsafe_seed, keep_logits, capture),
        ]
        alike = described(model, data_loader.dataset, units, method)
        ranks.require_alike({**alike, "what make_private was given": repr(arguments)})

    def open_ledger() -> Ledger:
        try:
            return Ledger.open_or_create(
                None if folder is None else folder / "ledger.jsonl",
                plan.header(method.describe(), fingerprint(trained)) | {"noise_rounds": int(noise_rounds)},
                event=plan.event(),
                budget_steps=plan.steps,
                side={side.kind: (side.event, side.count) for side in plan.side},
                resume=resume,
            )
        except OSError as error:
            raise ValueError(
                f"the ledger cannot be kept in {folder} ({error.strerror or error}): give an output_dir that the first process "
                "may write to"
            ) from error

    ledger = ranks.kept(open_ledger, Ledger.mirrored)
    stages: Stages | None = None
    try:
        open_stream = _streams(unsafe_seed, ranks)
        noise, draws = open_stream(rounds=noise_rounds), open_stream()
        observers: list[Observer] = []
        shared: dict[str, Any] = {"unit_map": unit_map, "observers": observers, "ranks": ranks}
        shared["one_unit"] = isolation is not None
        loader = PrivateLoader(data_loader, plan, units, draws, physical, **shared)
        books = Books(ledger, ranks)
        release = Release(trained, books, noise, batch_size, secure_rounding=secure_rounding)

        def open_engine(policy: Policy) -> Engine:
            return Engine(
                model,
                policy,
                loader.tickets,
                loss_reduction=loss_reduction,
                two_pass=two_pass,
                verify=partial(Checks, enabled=self_check),
                ranks=ranks,
                keep_logits=keep_logits,
                secret=not loader.reproducible,
                isolated=isolation is not None,
                graphs=Graphs if capture else None,
            )

        def open_access() -> Access:
            stream = open_stream()

            def open_loader(kind: str) -> PrivateLoader:
                return PrivateLoader(data_loader, plan, units, open_stream(), physical, kind=kind, **shared)

            def open_unprotected(rate: float) -> PrivateLoader:
                read = plan.settle(Budget(plan.sigma, (SideRelease("unprotected", 0.0, rate, 1),)))
                return PrivateLoader(data_loader, read, units, open_stream(), physical, kind="unprotected", **shared)

            return Access(
                books.record,
                open_loader,
                stream,
                secure_rounding=secure_rounding,
                returns_loss=loss_reduction is None,
                open_unprotected=open_unprotected if method.flaws() else None,
                ranks=ranks,
            )

        def open_replay(twin: Any, settled: Any, drawn: Sequence[list[Any]], together: int) -> Private:
            examples: Any = [example for unit in drawn for example in unit]
            largest = max(map(len, drawn))
            with alone():
                return make_private(
                    twin,
                    torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.0),
                    DataLoader(examples, batch_size=len(drawn), collate_fn=data_loader.collate_fn),
                    method=settled,
                    noise_multiplier=0.0,
                    epochs=1,
                    max_physical_batch_size=together * largest,
                    user_ids=None if user_ids is None else [unit for unit, own in enumerate(drawn) for _ in own],
                    max_examples_per_user=None if user_ids is None else largest,
                    unit_map=unit_map,
                    loss_reduction=loss_reduction,
                    two_pass=two_pass,
                    self_check=self_check,
                    isolation=isolation,
                    keep_logits=keep_logits,
                )

        stages = Stages(
            model,
            optimizer,
            method,
            plan.sigma,
            release,
            ledger,
            open_engine,
            folder,
            resume and folder is not None,
            ranks,
        )
        private = Private(
            model, optimizer, loader, stages, ledger, plan, open_access, open_replay, observers, criterion, ranks
        )
        private.given_optimizer = given
        return private
    except BaseException:
        if stages is not None:
            stages.close()
        ledger.abandon()
        raise


def _central(method: Any) -> Method:
    """A method that trains privately; TypeError for one that perturbs data instead, with the call that it wants."""
    kind = method if isinstance(method, type) else type(method)
    if call := _LOCAL.get(kind.__name__):
        raise TypeError(f"{kind.__name__} perturbs data before training and is no method of make_private: {call}")
    if not isinstance(method, Method):
        name = f"{kind.__name__}()" if isinstance(method, type) else "DPSGD(), RapFT(...) or DPFrost(...)"
        raise TypeError(f"method is a {type(method).__name__}, not settings of a method: give fastdp.{name}")
    return method


def _streams(unsafe_seed: int | None, ranks: Ranks) -> Callable[..., NoiseStream]:
    """Opens one stream after another, of 20 rounds or as told, each with a key of its own, which all ranks have."""
    if unsafe_seed is None:
        return NoiseStream if ranks.size == 1 else partial(NoiseStream.shared, ranks.key)
    seed = int(unsafe_seed)
    seeds = itertools.chain((2 * seed, 2 * seed + 1), itertools.count((seed + 1) << 64))
    return lambda rounds=20: NoiseStream.unsafe_reproducible(next(seeds), rounds)
