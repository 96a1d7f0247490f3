"""A private run: a model, an optimizer and a loader, joined so that each optimizer step is one accounted release."""

from __future__ import annotations

import copy
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

import fastdp.accounting as accounting
import fastdp.private.prove as proving
from fastdp.accounting.ledger import STEP
from fastdp.calls.modes import LoadedMode
from fastdp.distributed.pieces import is_dtensor
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import Engine
from fastdp.private.card import DISCARDED, training_card
from fastdp.private.checks import check_model
from fastdp.private.criterion import Criterion, mean_of_rows
from fastdp.private.ending import Ending
from fastdp.private.loader import PrivateLoader
from fastdp.private.method import Installed
from fastdp.private.observer import Observer
from fastdp.private.owner import RunOwner
from fastdp.private.preparation import Access, Outcome, Preparation, RunState
from fastdp.private.provenance import Provenance
from fastdp.private.publish import upload_to_hub
from fastdp.private.registry import register, unregister
from fastdp.private.stages import Stages
from fastdp.private.steps import Steps
from fastdp.validate import instance, number
from fastdp.verify import Checks
from fastdp.verify.state import StateCheck

_STATE_VERSION = 2


class Private:
    """A private training run; unpacks to ``(model, optimizer, data_loader)``.

    Attributes:
        plan: what is public about the run.
        total_steps: logical steps of the whole budget.

    Raises:
        RuntimeError: from ``optimizer.step()``, where no loss came through the engine.
        BudgetExceeded: from the loader, once all planned steps are made.

    >>> import fastdp
    >>> model, rows = torch.nn.Linear(3, 1), [{"x": torch.ones(3)}] * 8
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=4)
    >>> private = fastdp.make_private(model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-3, epochs=1)
    >>> private.total_steps, private.steps_done
    (2, 0)
    """

    def __init__(
        self,
        stages: Stages,
        data_loader: PrivateLoader,
        open_access: Callable[[], Access],
        open_replay: Callable[..., Private],
        observers: list[Observer],
        *,
        given_optimizer: torch.optim.Optimizer,
        criterion: Criterion | None = None,
        installed: Installed | None = None,
    ):
        self.model, self.optimizer, self.data_loader = stages.model, stages.optimizer, data_loader
        #: What `make_private` was given: the same, or a wrapper of accelerate's round it.
        self.given_optimizer = given_optimizer
        self.method, self.plan, self.ledger = stages.method, stages.plan, stages.ledger
        self.criterion = criterion
        #: The processes that train together.
        self.ranks = stages.ranks
        self._stages = stages
        self._release = stages.release
        self._open_access = open_access
        self._open_replay = open_replay
        self._observers = observers
        self._observed: set[str] = set()
        self._assumed: list[str] = []
        #: The most tokens that settings let a unit have, for the card.
        self.longest: int | None = None
        self.installed = installed
        moved = stages.parameters if installed is None else installed.trained
        self._state.moved = frozenset(map(id, () if installed is None else moved.values()))
        self._provenance = Provenance(self.model, moved, self.ledger, lambda: self._state)
        self._epsilons: dict[tuple[tuple[int, ...], float], float] = {}
        changes = stages.prepares or stages.method.follows_schedule or installed is not None
        self._steps = Steps(stages, observers, self._stepped, changes=changes)
        register(self, self.model, self.optimizer)
        # As long as the model is driven, its run can be asked to let it go.
        stages.holder = self
        self._loaded_mode = LoadedMode(self.model)
        #: What is said where the run ends early.
        self.ending = Ending(self.ledger, data_loader.tickets, counts=self.plan.sigma > 0 and self.ranks.leads)
        self._collected = weakref.finalize(self, self.ending)
        data_loader.owner = RunOwner(stages, self._begin_iteration, self._include_unfrozen)
        data_loader.most_tokens = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        self._follow_schedule()

    def __iter__(self) -> Iterator[Any]:
        yield from (self.model, self.given_optimizer, self.data_loader)

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation over sensitivity of one release, before the factors of a schedule."""
        return self.plan.sigma

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        raise AttributeError(
            "the noise of a run is settled, as its ledger counts on it: call detach() and make the run private anew, in another "
            "output_dir"
        )

    @property
    def sample_rate(self) -> float:
        """Probability with which a unit joins a logical batch."""
        return self.plan.sample_rate

    @property
    def steps_per_epoch(self) -> int:
        """Logical steps of an epoch."""
        return self.plan.steps_per_epoch

    @property
    def target_delta(self) -> float | None:
        """The delta at which epsilon is stated unless another is given."""
        return self.plan.delta

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What is trained at present, by name."""
        return self._engine.parameters

    @property
    def policy(self) -> Policy:
        """How the logical batch at hand is clipped and noised."""
        return self._engine.accumulator.policy

    @property
    def expected_batch_size(self) -> float:
        """What the noisy sum of a logical batch is divided by."""
        return self._release.expected_batch_size

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who looks on at the run from inside."""
        return tuple(self._observers)

    def observe(self, observer: Observer) -> None:
        """Let an observer look on at the private side, for an audit or a test; the card says so from here on.

        Raises ValueError for one that looks on already.
        """
        if observer in self._observers:
            raise ValueError("this observer looks on already")
        self._observers.append(observer)
        self._observed.add(type(observer).__name__)

    def assume(self, statement: str) -> None:
        """Have the card say what the run takes for granted besides."""
        self._assumed.append(statement)

    def unobserve(self, observer: Observer) -> None:
        """Send an observer away."""
        self._observers.remove(observer)

    @property
    def total_steps(self) -> int:
        return self.ledger.budget_steps

    @property
    def steps_done(self) -> int:
        """Logical steps released or, after a crash, possibly released."""
        return self.ledger.spent_steps

    @property
    def last_step_done(self) -> bool:
        """Whether the latest ``optimizer.step()`` released a logical batch (earlier micro-batches do nothing)."""
        return self._steps.done

    @property
    def route(self) -> str | None:
        """How per-example gradients are obtained: ``uses``, ``one-example`` or ``ordinary``; None before the first batch."""
        return self._engine.route

    @property
    def backward_passes(self) -> int:
        """The most backward passes that a micro-batch took: 2 if a checkpointed model is short of memory, 0 before the first."""
        return self._engine.backward_passes

    @property
    def microbatches(self) -> dict[str, int]:
        """How many microbatches were replayed from a recording (`capture`), and how many ran eagerly; since a preparation."""
        recorded = self._engine.graphs.replays if self._engine.graphs is not None else 0
        return {"recorded": recorded, "eager": self._engine.backwards - recorded}

    def _begin_iteration(self) -> None:
        self.ending.begun = True
        self._loaded_mode.end(train=True)
        if self.installed is not None:
            # In evaluation mode a call is the model's own.
            self.model.train()
        self._abandon()
        self._provenance.begin()
        self.ledger.begin_pass()
        for observer in self._observers:
            observer.begin_pass()
        self._include_unfrozen()
        self.prepare()

    def _include_unfrozen(self) -> None:
        """Before a logical batch: train what the loop has unfrozen since make_private, and the optimizer holds."""
        known, held = self._stages.known, [group["params"] for group in self.optimizer.param_groups]
        if all(known.issuperset(map(id, own)) for own in held):
            return
        new = {id(p) for own in held for p in own if p.requires_grad} - known
        if not new or self.installed is not None or self.method.selects or self._stages.prepares:
            return
        check_model(self.model, self.optimizer)
        self._stages.include({n: p for n, p in self.model.named_parameters() if id(p) in new})
        self._follow_schedule()

    def _abandon(self) -> None:
        if self._engine.abandon() and not self.ledger.untouched and self.ledger.noted(DISCARDED) is None:
            self.ledger.note(DISCARDED, "begun, not released")

    @property
    def _engine(self) -> Engine:
        return self._stages.engine

    @property
    def _state(self) -> StateCheck:
        return cast(Checks, self._stages.engine.checks).state

    @property
    def outcome(self) -> Outcome:
        """What the method's latest preparation released, by name: a mask, a selection. Empty before the first."""
        return self._stages.outcome

    def _stepped(self) -> None:
        if self.ledger.spent_steps >= self.ledger.budget_steps:
            self._provenance.end()
        self.prepare()

    def prepare(self) -> None:
        """Make the release that the method needs before the next step, if one is due.

        Happens by itself when iteration over the loader begins, and after a step.
        """
        if self._stages.prepares and self.steps_done < self.total_steps and self._stages.due(self.steps_done):
            state = RunState(self.plan, self.model, self._stages.parameters, self.steps_done, self.outcome)
            self._stages.prepare(Preparation(state, self._open_access()))
        self._follow_schedule()

    def _follow_schedule(self) -> None:
        """The policy of the step to come, by its number in the ledger, which its event goes by too."""
        step, accumulator = self.steps_done, self._engine.accumulator
        if self.installed is not None:
            self.installed.number = step
        if accumulator.policy.bounds:
            accumulator.policy = self._scheduled(accumulator.policy, step)

    def _scheduled(self, policy: Policy, step: int) -> Policy:
        return self.method.scheduled(policy, self._stages.first_policy, self.plan.sigma_at(step), step)

    @property
    def nonfinite_examples(self) -> int:
        """How many examples were left out so far because their loss or gradient was not finite."""
        return int(self._steps.nonfinite)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        """The mean over a batch's rows of the losses that ``criterion`` gives them; call backward() on it.

        Raises RuntimeError without a criterion, ValueError if it does not return one loss a row.
        """
        if self.criterion is None:
            raise RuntimeError("this run has no criterion: give make_private criterion=, a function of (output, batch)")
        tickets = self.data_loader.tickets
        rows = tickets[0].rows if self._engine.trains and tickets else None
        return mean_of_rows(self.criterion(output, batch), rows)

    def epsilon(self, delta: float | None = None) -> float:
        """Privacy spent so far, an upper bound (PLD, pessimistic), at ``delta`` (default: the target).

        inf without noise, with a reproducible key, at a delta that is not below 1/N, and for a method whose guarantee is void
        (the card says why); 0 before the first step.
        """
        number(delta=delta)
        delta = self.target_delta if delta is None else delta
        if self.ledger.untouched:
            return 0.0
        if self.noise_multiplier == 0 or self.method.flaws() or self._release.stream.reproducible:
            return math.inf
        if delta is None:
            raise ValueError("no target_delta was given; pass delta")
        if delta >= 1 / self.plan.units:
            return math.inf
        key = (tuple(self.ledger.spent(kind) for kind in self.ledger.kinds), delta)
        if key not in self._epsilons:
            self._epsilons[key] = accounting.epsilon(self.ledger.event(), delta, adjacency=self.plan.adjacency)
        return self._epsilons[key]

    def extend(self, epochs: float) -> None:
        """Add epochs to the budget, and what the method releases in them; epsilon grows and is accounted anew."""
        number(epochs=epochs)
        if not 0 < epochs < math.inf:
            raise ValueError(f"epochs is {epochs}: extend by a positive number")
        total = self.total_steps + math.ceil(epochs * self.steps_per_epoch)
        before, after = (sum(map(self.method.prepares_at, range(steps))) for steps in (self.total_steps, total))
        if after > before:
            for kind in self.ledger.kinds.keys() - {STEP}:
                # Every preparation makes as many releases of a kind as the others.
                self.ledger.extend(self.ledger.budget(kind) // before * after, kind)
        self.ledger.extend(total)
        self._provenance.ended = False

    def card(self) -> accounting.Card:
        """What was bought: mechanism, unit, sampling, epsilon and delta, the event, what is unprotected.

        Of weights in pieces every rank must ask, as each has some of what the card keeps digests of. A warning says so if the
        latest iteration was broken off with releases left.
        """
        if self.data_loader.cut_short:
            self.ending(stacklevel=3)
        self._provenance.note_changes()
        self._provenance.note_earlier_runs()
        return training_card(
            self._stages,
            self.data_loader,
            self._provenance,
            installed=self.installed,
            observed=self._observed,
            assumed=self._assumed,
            longest=self.longest,
        )

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write model and card to a folder that others can use: weights, ``card.json``, ``card.md`` and ``README.md``.

        The README is a model card with metadata and a section on privacy, both written from the claim; it takes the place of
        what the model's own ``save_pretrained`` wrote there. ``options`` are for that. Returns the folder.

        Raises ValueError for a model without ``save_pretrained``.
        """
        save = getattr(self.model, "save_pretrained", None)
        if not callable(save):
            name = type(self.model).__name__
            raise ValueError(f"{name} has no save_pretrained: save its state_dict, and card() beside it")
        save(str(folder), **options)
        return self.card().save_beside(folder)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what `save_pretrained` writes, the card with it, to a model hub; returns what the hub says of it.

        Args:
            repo_id: the name on the hub, such as ``anna/notes``; made if it is missing.
            options: for ``HfApi.upload_folder``, as ``commit_message``.
        """
        with tempfile.TemporaryDirectory() as folder:
            return upload_to_hub(self.save_pretrained(folder), repo_id, **options)

    def state_dict(self) -> dict[str, Any]:
        """Step counts and spent budget, for a checkpoint; never a key, so a resumed run repeats no noise."""
        self._provenance.note_changes()
        return {
            "version": _STATE_VERSION,
            "model": self.ledger.header["fingerprint"],
            "weights": self._provenance.remember(),
            "run_id": self.ledger.run_id,
            "ledger_head": self.ledger.head,
            "steps_done": self.steps_done,
            "noise_multiplier": self.noise_multiplier,
            "bounds": list(self._engine.accumulator.policy.bounds),
            "stds": list(self._engine.accumulator.policy.stds),
            "spent": {kind: self.ledger.spent(kind) for kind in self.ledger.kinds},
            "outcome": dict(self.outcome),
            "prepared_step": self._stages.prepared_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore step counts; the spent budget becomes the larger of the checkpoint's and the ledger's.

        Raises ValueError for a state of another version or model, or with another noise level.
        """
        instance(Mapping, "what state_dict() returned", state=state)
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"this checkpoint's privacy state has version {state.get('version')}; expected {_STATE_VERSION}"
            )
        if state["model"] != self.ledger.header["fingerprint"]:
            raise ValueError("this checkpoint belongs to another model: its trained parameters differ in name or shape")
        if state["noise_multiplier"] != self.noise_multiplier:
            raise ValueError(
                f"this checkpoint was made at noise multiplier {state['noise_multiplier']:.6g}, the run has "
                f"{self.noise_multiplier:.6g}; give the same privacy arguments"
            )
        self.ledger.restore(state["spent"], state["ledger_head"])
        self._state.settle()
        self._provenance.resume(state.get("weights"))
        if state["prepared_step"] >= 0:
            self._stages.adopt(state["outcome"], state["prepared_step"])
        if self.policy.bounds:
            policy = replace(self.policy, bounds=tuple(state["bounds"]), stds=tuple(state["stds"]))
            known = self._scheduled(self._stages.first_policy, state["steps_done"])
            if not math.isclose(policy.noise_multiplier, known.noise_multiplier, rel_tol=1e-6):
                raise ValueError(
                    "this checkpoint's noise is not the run's for its clipping bounds: it was edited, or is of another method"
                )
            self._engine.accumulator.policy = policy
        self._steps.expect_state()
        self._follow_schedule()

    def prove(
        self, *, loss: Callable[[Any, Any], torch.Tensor] | None = None, longest: int | None = None
    ) -> proving.Evidence:
        """Replay neighbouring data sets through a copy of the model as it is now, and measure how far releases move.

        The copy takes single steps at a learning rate of 0, without noise; the run itself is left alone. See `docs/audit.md`.

        Args:
            loss: (model, batch) -> loss, where the model does not return it.
            longest: most tokens of an example that is made longer; by default 8 times the longest, if the model takes so many.

        Raises:
            ValueError: for a run that claims nothing, and for examples that the run refuses as they are.
        """
        if not self.policy.bounds:
            raise ValueError("the non-private method claims nothing, so there is nothing to prove")
        if any(map(is_dtensor, self.model.parameters())):
            raise ValueError(
                "weights in pieces cannot be copied: prove a run of the same model, or of a smaller one, in one process"
            )
        loader, twin = self.data_loader, copy.deepcopy(self.model).train()
        if self.installed is not None:
            self.installed.plain(twin)
        method = proving.PreparedMethod(self.method, self.outcome)
        units = [
            [loader.dataset[index] for index in loader.units.examples(unit)]
            for unit in proving.spread_out(len(loader.units))
        ]
        return proving.prove_run(
            lambda drawn: self._open_replay(twin, method, drawn, proving.RECORDS_PER_PASS),
            units,
            loss,
            longest or proving.most_tokens_taken(self.model, units),
        )

    def detach(self) -> None:
        """Give model and optimizer back as they were before `make_private`; the ledger is closed.

        A warning says so if releases that were paid for were not made.
        """
        self.ending(stacklevel=3)
        self._collected.detach()
        self._loaded_mode.end(train=False)
        self._provenance.close()
        self._abandon()
        self._steps.remove()
        self._stages.close()
        if self.installed is not None:
            self.installed.remove()
        self.ledger.close()
        unregister(self.model, self.optimizer)
