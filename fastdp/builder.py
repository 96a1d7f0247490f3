"""How `make_private` builds a run: options are checked, then planned, then a ledger is opened, then everything is joined."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdp.accounting import Ledger
from fastdp.accounting.ledger import STEP
from fastdp.calls.batches import accepted, map_tensors
from fastdp.calls.modes import kept_modes
from fastdp.calls.randomness import unchanged
from fastdp.distributed.pieces import is_dtensor
from fastdp.distributed.ranks import Ranks, single_process
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.methods.dpsgd import DPSGD
from fastdp.ops.stream import CIPHER_ROUNDS, NoiseStream
from fastdp.private.checks import (
    check_budget,
    check_model,
    digest_setup,
    refuse_accumulation,
    refuse_capture,
    refuse_frozen,
    refuse_fused_loss,
    refuse_in_pieces,
    refuse_made_of_examples,
    refuse_repeats,
    unwrap_model,
)
from fastdp.private.criterion import Criterion, mean_of_rows
from fastdp.private.graphs import Graphs
from fastdp.private.loader import PrivateLoader, check_loader
from fastdp.private.method import Method
from fastdp.private.observer import Observer
from fastdp.private.plan import Budget, Plan, SideRelease, fingerprint
from fastdp.private.preparation import Access, RunState
from fastdp.private.registry import refuse_driven
from fastdp.private.release import Release, ReplicatedLedger
from fastdp.private.run import Private
from fastdp.private.sampler import Units, steps_per_epoch
from fastdp.private.schedules import refuse_private_schedules
from fastdp.private.shapes import PublicShapes
from fastdp.private.stages import Stages
from fastdp.private.steps import refuse_used_optimizer
from fastdp.validate import instance, integer, number
from fastdp.verify import Checks

#: Methods that are no argument of `make_private`, and how each is used.
_LOCAL = {
    "EWFT": "call fastdp.EWFT(model, ...) and train the model as ever, with an ordinary optimizer and loader",
    "TextPrivatizer": "call fastdp.TextPrivatizer(model, eta=...) on the texts, and train on what it returns",
    "SelectivePerturbation": "call fastdp.SelectivePerturbation(...) on the texts, and train on what it returns",
}


#: Options that are True or False; None leaves the choice to the run.
_SWITCHES = ("resume", "secure_rounding", "two_pass", "self_check", "keep_logits", "allow_large_delta")


@dataclass(frozen=True)
class RunOptions:
    """The arguments of `make_private` besides the model, the optimizer and the loader, which it documents."""

    method: Any = None
    target_epsilon: float | None = None
    target_delta: float | None = None
    epochs: float | None = None
    noise_multiplier: float | None = None
    max_physical_batch_size: int | None = None
    sampling: str = "poisson"
    adjacency: str | None = None
    user_ids: Sequence[Hashable] | None = None
    max_examples_per_user: int | None = None
    unit_map: str | None = None
    loss_reduction: str | None = None
    criterion: Criterion | None = None
    output_dir: str | os.PathLike[str] | None = None
    resume: bool = False
    secure_rounding: bool = True
    noise_rounds: int = 20
    two_pass: bool | None = None
    self_check: bool = True
    isolation: str | None = None
    keep_logits: bool | None = None
    capture: bool | str | None = "auto"
    shapes: Any = None
    unsafe_seed: int | None = None
    allow_large_delta: bool = False

    def check_types(self) -> None:
        """Raise ValueError or TypeError for values of other types than the arguments have."""
        number(
            target_epsilon=self.target_epsilon,
            target_delta=self.target_delta,
            epochs=self.epochs,
            noise_multiplier=self.noise_multiplier,
        )
        integer(
            1, max_physical_batch_size=self.max_physical_batch_size, max_examples_per_user=self.max_examples_per_user
        )
        integer(0, unsafe_seed=self.unsafe_seed)
        switches = {name: getattr(self, name) for name in _SWITCHES}
        instance(bool | int | None, "True or False", **switches)
        instance(Sized | None, "a list with the user of each example", user_ids=self.user_ids)
        instance(str | None, "the name of a batch entry", unit_map=self.unit_map)
        instance(str | os.PathLike | None, "the path of a folder", output_dir=self.output_dir)
        instance(Callable | None, "a function of (output, batch)", criterion=self.criterion)
        if self.max_examples_per_user is not None and self.user_ids is None:
            raise ValueError("max_examples_per_user bounds a user's share, and no user is known: give user_ids as well")

    def check(self) -> None:
        """Raise ValueError for values that no model or loader makes right."""
        if self.unit_map is not None and not self.returns_loss:
            raise ValueError(
                "a criterion outside the model cannot be tried on packed rows. Let the model return its own "
                "loss, or leave unit_map out."
            )
        if self.loss_reduction not in (None, "mean", "sum"):
            raise ValueError(
                f"loss_reduction is '{self.loss_reduction}': use 'mean' or 'sum', or None if the model returns its loss"
            )
        if self.noise_rounds not in CIPHER_ROUNDS:
            raise ValueError(
                f"noise_rounds is {self.noise_rounds!r}: noise has 20 rounds of ChaCha, or 12 where that is asked for"
            )
        if self.criterion is not None and self.loss_reduction is not None:
            raise ValueError("loss_reduction and criterion are two ways to say one thing; leave loss_reduction out")
        if self.epochs is None or not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ValueError(f"epochs is {self.epochs}: state how many passes over the data the budget must last for")
        if self.isolation not in (None, "per_example"):
            raise ValueError(f"isolation is {self.isolation!r}: use 'per_example', or leave it out")
        if self.capture not in (None, False, True, "auto"):
            raise ValueError(f"capture is {self.capture!r}: use 'auto', True or False")
        if self.isolation is not None and (self.unit_map is not None or self.capture not in (None, False, "auto")):
            raise ValueError("isolation='per_example' runs each example alone: leave unit_map and capture out")
        if self.public_shapes is not None and self.unit_map is not None:
            raise ValueError(
                "Packed rows hold several examples, whose lengths decide each other's places. Leave shapes or unit_map out."
            )

    @property
    def public_shapes(self) -> PublicShapes | None:
        """The shapes of microbatches, where they are public and rows do not run alone."""
        shapes = PublicShapes.of(self.shapes)
        return None if self.isolation is not None else shapes

    @property
    def own_shapes(self) -> bool:
        """Whether the examples drawn decide the shapes of their microbatches."""
        return self.public_shapes is None and self.isolation is None

    @property
    def returns_loss(self) -> bool:
        """Whether the model returns its loss."""
        return self.criterion is None and self.loss_reduction is None

    @property
    def reduction(self) -> str | None:
        """How a criterion outside the model reduces the losses of rows; None if the model returns its loss."""
        return self.loss_reduction if self.criterion is None else "mean"

    @property
    def engine_reduction(self) -> str | None:
        """As `reduction`; "auto" where the first batch may show that the model returns no loss."""
        return self.reduction or ("auto" if self.unit_map is None and self.capture is not True else None)

    @property
    def folder(self) -> Path | None:
        """Where the ledger is kept."""
        return None if self.output_dir is None else Path(self.output_dir)


class Builder:
    """Builds one private run from the arguments of `make_private`; accelerate's wrappers are looked through.

    Attributes:
        plan: what is public about the run, once it is checked.
    """

    plan: Plan

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data_loader: DataLoader, options: RunOptions
    ):
        self.model, self.optimizer, self.data_loader, self.options = model, optimizer, data_loader, options
        self.given_optimizer, self.ranks = optimizer, Ranks.here()

    def build(self) -> Private:
        """Check everything, open the ledger, and join. Raises ValueError or TypeError before any budget is spent."""
        with self.ranks.together():
            self._unwrap()
            self._check()
            self.installed = self.method.install(self.model, self.optimizer)
        try:
            return self._build()
        except BaseException:
            if self.installed is not None:
                self.installed.remove()
            raise

    def _build(self) -> Private:
        with self.ranks.together():
            self._settle()
            self._check_method()
        if self.ranks.size > 1:
            self._require_alike()
        ledger = self.ranks.open_on_first(self._open_ledger, Ledger.mirrored)
        stages: list[Stages] = []
        try:
            return self._join(ledger, stages)
        except BaseException:
            for opened in stages:
                opened.close()
            ledger.abandon()
            raise

    # Checks.

    def _unwrap(self) -> None:
        self.options.check_types()
        instance(torch.nn.Module, "the torch.nn.Module that is trained", model=self.model)
        if isinstance(self.optimizer, type) or not hasattr(self.optimizer, "param_groups"):
            instance(
                torch.optim.Optimizer,
                "one torch.optim.Optimizer; fastdp.optim.ChainedOptimizer joins several",
                optimizer=self.optimizer,
            )
        # accelerate's wrapper has no hooks of its own.
        while isinstance(inner := getattr(self.optimizer, "optimizer", None), torch.optim.Optimizer):
            refuse_accumulation(self.optimizer)
            self.optimizer = inner
        self.model = unwrap_model(self.model)
        self.method = _central(DPSGD() if self.options.method is None else self.options.method)

    def _check(self) -> None:
        """Refuse a model, an optimizer or a loader that cannot be trained privately."""
        options = self.options
        refuse_driven(self.model, self.optimizer)
        if not options.resume:
            # A resumed run takes the state of its checkpoint, before or after: pieces are loaded before.
            refuse_used_optimizer(self.optimizer)
        refuse_private_schedules(self.optimizer)
        check_model(self.model, self.optimizer)
        refuse_made_of_examples(self.model)
        if isinstance(self.data_loader, PrivateLoader):
            self.data_loader = self.data_loader.given
        self.batch_size = check_loader(self.data_loader)
        options.check()
        if options.public_shapes is not None and self.ranks.size > 1:
            raise ValueError(
                "Processes would run different numbers of passes, one for each length in a batch. Leave shapes out, or train in "
                "one process."
            )
        if options.returns_loss:
            refuse_fused_loss(self.model)
        self.graphs = self._open_graphs() if options.capture and options.isolation is None else None

    def _open_graphs(self) -> Callable[..., Graphs] | None:
        """What records microbatches. Raises ValueError where it is asked for and cannot."""
        options, force = self.options, self.options.capture != "auto"
        try:
            refuse_capture(
                self.model,
                returns_loss=options.returns_loss,
                two_pass=options.two_pass,
                keep_logits=options.keep_logits,
            )
        except ValueError:
            if force:
                raise
            return None
        return partial(Graphs, force=force)

    def _settle(self) -> None:
        """Settle the units, the size of microbatches and the plan, noise included."""
        options, method = self.options, self.method
        self.units = units = Units(
            len(self.data_loader.dataset),  # type: ignore[arg-type]
            options.user_ids,
            options.max_examples_per_user,
        )
        refuse_repeats(self.data_loader.dataset, units)
        # Without a limit, whatever is drawn is one microbatch.
        self.physical = options.max_physical_batch_size or len(self.data_loader.dataset)  # type: ignore[arg-type]
        if options.isolation is not None:
            self.physical = units.largest
        rows = units.largest + (options.public_shapes is not None and units.members is not None)
        if self.physical < rows:
            raise ValueError(
                f"a user takes up to {rows} rows but max_physical_batch_size is {self.physical}: raise it, or lower "
                "max_examples_per_user"
            )
        per_epoch = steps_per_epoch(len(units), self.batch_size)
        usual = "zero_out" if options.sampling == "shuffled" else "add_remove"
        users = f"user (at most {options.max_examples_per_user} examples)"
        plan = Plan(
            units=len(units),
            batch_size=self.batch_size,
            steps=math.ceil((options.epochs or 0) * per_epoch),
            steps_per_epoch=per_epoch,
            sampling=options.sampling,  # type: ignore[arg-type]
            adjacency=usual if options.adjacency is None else options.adjacency,  # type: ignore[arg-type]
            target_epsilon=options.target_epsilon,
            delta=options.target_delta,
            noise_multiplier=options.noise_multiplier,
            unit="example" if options.user_ids is None else users,
            factors=method.noise_factors,
        )
        budget = options.target_delta, options.target_epsilon, options.noise_multiplier
        check_budget(*budget, method.mechanism, len(units), options.allow_large_delta)
        self.plan = plan.settle(method.budget(plan))

    def _check_method(self) -> None:
        """Refuse parameters that the method cannot train, before a ledger exists."""
        options = self.options
        refuse_in_pieces(self.model, keep_logits=options.keep_logits)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        #: What releases move: the model's own parameters, whatever the engine trains.
        self.moved = self.trained if self.installed is None else self.installed.trained
        for factor in {1.0, *(factor for _, factor in self.plan.factors)}:
            self.method.policy(self.trained, self.plan.sigma * factor, {})
        if self.method.selects:
            refuse_frozen(self.model, self.optimizer)
        if self.method.needs_public_shapes and options.own_shapes:
            raise ValueError(
                f"With {self.method.mechanism}, one record's shape may move what others add by many bounds: pass "
                'shapes="public", or isolation="per_example"'
            )
        usual = options.returns_loss and options.unit_map is None and options.capture in (None, False, "auto")
        if self.installed is not None and not (usual and self.ranks.size == 1):
            raise ValueError(
                f"{self.method.mechanism} takes the loss of each row from the model, in one process: leave criterion, "
                "loss_reduction, unit_map and capture out"
            )
        if self.method.takes_losses and options.loss_reduction is not None:
            raise ValueError(
                f"{self.method.mechanism} takes losses in passes of its own: give make_private criterion=, which returns one "
                "loss a row, in the place of loss_reduction"
            )
        if self.ranks.size == 1 and not any(map(is_dtensor, self.model.parameters())):
            self._try_passes()

    def _try_passes(self) -> None:
        """Refuse a model that the method's own passes could not go through, on one example and without a trace."""
        method, criterion = self.method, self.options.criterion

        def one() -> Any:
            device = next(iter(self.trained.values())).device
            batch = self.data_loader.collate_fn([self.data_loader.dataset[0]])
            return map_tensors(batch, lambda tensor: tensor.to(device))

        with kept_modes(self.model), unchanged(self.model):
            try:
                method.try_passes(RunState(self.plan, self.model, self.trained, 0, {}), one)
                if method.takes_losses and criterion is not None:
                    batch = one()
                    args, kwargs = accepted(self.model, batch)
                    with torch.no_grad():
                        mean_of_rows(criterion(self.model.eval()(*args, **kwargs), batch), None)
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{method.mechanism} calls the model itself, and on one example it raised {type(error).__name__}: {error}. "
                    "Let batches be mappings of forward()'s arguments."
                ) from error

    def _require_alike(self) -> None:
        """Raise ValueError unless all ranks were given the same."""
        own = ("method", "criterion", "output_dir", "user_ids", "max_examples_per_user", "max_physical_batch_size")
        given = [value for name, value in vars(self.options).items() if name not in own]
        arguments = [
            *(self.plan, self.method.describe(), self.physical, self.options.user_ids is None),
            *(self.options.folder is None, *given),
        ]
        alike = digest_setup(self.model, self.data_loader.dataset, self.units, self.method)
        self.ranks.require_alike({**alike, "what make_private was given": repr(arguments)})

    # Parts of the run.

    def _open_ledger(self) -> Ledger:
        options, plan, folder = self.options, self.plan, self.options.folder
        try:
            return Ledger.open_or_create(
                None if folder is None else folder / "ledger.jsonl",
                plan.header(self.method.describe(), fingerprint(self.moved))
                | {"noise_rounds": int(options.noise_rounds), "shapes": "own" if options.own_shapes else "public"},
                event=plan.event(),
                budget_steps=plan.steps,
                side={side.kind: (side.event, side.count) for side in plan.side},
                resume=options.resume,
            )
        except OSError as error:
            raise ValueError(
                f"the ledger cannot be kept in {folder} ({error.strerror or error}): give an output_dir that the first process "
                "may write to"
            ) from error

    def _join(self, ledger: Ledger, opened: list[Stages]) -> Private:
        """The run; its stages are among ``opened`` as soon as they hold something."""
        options, noise = self.options, self._open_stream(rounds=self.options.noise_rounds)
        self.observers: list[Observer] = []
        self.recorder = ledger if self.ranks.size == 1 else ReplicatedLedger(ledger, self.ranks)
        self.loader = self._open_loader(STEP)
        release = Release(self.trained, self.recorder, noise, self.batch_size, secure_rounding=options.secure_rounding)
        resumed = options.resume and options.folder is not None
        stages = Stages(
            *(self.model, self.optimizer, self.method, self.plan, release, ledger),
            *(self._open_engine, options.folder, resumed, self.ranks),
        )
        opened.append(stages)
        return Private(
            *(stages, self.loader, self._open_access, self._open_replay, self.observers),
            given_optimizer=self.given_optimizer,
            criterion=options.criterion,
            installed=self.installed,
        )

    @cached_property
    def _open_stream(self) -> Callable[..., NoiseStream]:
        """Opens one stream after another, of 20 rounds or as told, each with a key of its own, which all ranks have."""
        if self.options.unsafe_seed is None:
            return NoiseStream if self.ranks.size == 1 else partial(NoiseStream.shared, self.ranks.key)
        seed = int(self.options.unsafe_seed)
        seeds = itertools.chain((2 * seed, 2 * seed + 1), itertools.count((seed + 1) << 64))
        return lambda rounds=20: NoiseStream.unsafe_reproducible(next(seeds), rounds)

    def _open_loader(self, kind: str, plan: Plan | None = None) -> PrivateLoader:
        return PrivateLoader(
            *(self.data_loader, plan or self.plan, self.units, self._open_stream(), self.physical),
            kind=kind,
            unit_map=self.options.unit_map,
            observers=self.observers,
            ranks=self.ranks,
            one_unit=self.options.isolation is not None,
            shapes=self.options.public_shapes,
        )

    def _open_engine(self, policy: Policy) -> Engine:
        options = self.options
        return Engine(
            self.model,
            policy,
            self.loader.tickets,
            loss_reduction=options.engine_reduction if self.installed is None else options.reduction,
            two_pass=options.two_pass,
            verify=partial(Checks, enabled=options.self_check),
            ranks=self.ranks,
            keep_logits=options.keep_logits,
            secret=not self.loader.reproducible,
            isolated=options.isolation is not None,
            graphs=self.graphs if self.installed is None else None,
        )

    def _open_access(self) -> Access:
        return Access(
            self.recorder.record,
            self._open_loader,
            self._open_stream(),
            secure_rounding=self.options.secure_rounding,
            reduction=self.options.reduction,
            criterion=self.options.criterion,
            open_unprotected=self._open_unprotected if self.method.flaws() else None,
            ranks=self.ranks,
        )

    def _open_unprotected(self, rate: float) -> PrivateLoader:
        side = SideRelease("unprotected", 0.0, rate, 1)
        return self._open_loader("unprotected", self.plan.settle(Budget(self.plan.sigma, (side,))))

    def _open_replay(self, twin: Any, settled: Any, drawn: Sequence[list[Any]], together: int) -> Private:
        """A run without noise on a copy of the model and on the units that were drawn, for `prove`."""
        examples: Any = [example for unit in drawn for example in unit]
        largest, users = max(map(len, drawn)), self.options.user_ids is not None
        options = RunOptions(
            method=settled,
            noise_multiplier=0.0,
            epochs=1,
            max_physical_batch_size=together * largest,
            user_ids=[unit for unit, own in enumerate(drawn) for _ in own] if users else None,
            max_examples_per_user=largest if users else None,
            unit_map=self.options.unit_map,
            loss_reduction=self.options.reduction,
            two_pass=self.options.two_pass,
            self_check=self.options.self_check,
            isolation=self.options.isolation,
            keep_logits=self.options.keep_logits,
            capture=False,
        )
        optimizer = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.0)
        loader: Any = DataLoader(examples, batch_size=len(drawn), collate_fn=self.data_loader.collate_fn)
        with single_process():
            return Builder(twin, optimizer, loader, options).build()


def _central(method: Any) -> Method:
    """A method that trains privately; TypeError for one that perturbs data instead, with the call that it wants."""
    kind = method if isinstance(method, type) else type(method)
    if call := _LOCAL.get(kind.__name__):
        raise TypeError(f"{kind.__name__} perturbs data before training and is no method of make_private: {call}")
    if not isinstance(method, Method):
        name = f"{kind.__name__}()" if isinstance(method, type) else "DPSGD(), RapFT(...) or DPFrost(...)"
        given = f"the class {kind.__name__}" if isinstance(method, type) else f"of type {kind.__name__}"
        raise TypeError(f"method is {given}, not settings of a method: give fastdp.{name}")
    return method
