"""What a call of `optimizer.step()` does: nothing before a logical batch is whole, then its release, and the update."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

import fastdp.ops as ops
from fastdp.calls.batches import tensors
from fastdp.distributed.pieces import row, writes
from fastdp.engine.capture.trace import LOOKUPS, Trace
from fastdp.engine.clip.policy import Policy
from fastdp.engine.engine import gc_paused
from fastdp.ops.stream import NoiseStream
from fastdp.private.observer import Observer
from fastdp.private.schedules import follow_releases, forget_releases
from fastdp.private.stages import Stages
from fastdp.verify import Checks
from fastdp.verify.state import UNDECLARED

_SHAPE = operator.attrgetter("shape")
#: Under this name the ledger keeps that steps were released without checks of the model.
UNCHECKED = "unchecked rows"
HOOK_WRITES = "what hooks of optimizer.step() write to the weights follows from released weights or public values"
PENALTY = "what the loop's loss gives weights directly, without clipping or noise, follows from the weights alone"
_EVALUATES = (
    "The model is in eval mode since this batch was drawn: call model.train(), or model.eval() before the "
    "loop to train without dropout."
)
_READS = (
    "This optimizer's step goes by a loss, which has no noise. Use one that goes by gradients, or set "
    "optimizer.param_groups by public figures."
)
_PARTS = (
    "The loop called parts of the model, which nothing clipped. Call the model's own forward(), or one module "
    "that calls the parts in its forward()."
)
_WARM = (
    "Nothing shows that releases alone made this optimizer's state: build a new optimizer; to resume, load its "
    "state and private.load_state_dict after make_private."
)
_STATE_LOADED = (
    "Nothing shows that releases made the optimizer's state that was loaded. To resume, call "
    "private.load_state_dict as well."
)


class Steps:
    """Hooks of torch's round the steps of one optimizer.

    Args:
        observers: who looks on; others may join.
        prepare: called after the last update of the budget, and where ``changes`` says that anything may differ from one step
            to the next, after each: for what the method may do before the next step.

    Attributes:
        done: whether the latest step released a logical batch.
    """

    def __init__(self, stages: Stages, observers: list[Observer], prepare: Callable[[], None], *, changes: bool):
        self._stages, optimizer = stages, stages.optimizer
        self._model, self._optimizer, self._ranks = stages.model, optimizer, stages.ranks
        self._ledger, self._plan = stages.ledger, stages.plan
        self._prepare, self._changes = prepare, changes
        self._shapes = self._current_shapes()
        #: Whether a state of the optimizer may be loaded until the next release; and whether one was that may not.
        self._expects_state, self._foreign_state = stages.ledger.spent_steps > 0, False
        self._observers = observers
        self.done = False
        #: On the device: to read it would make the host wait before each release.
        self.nonfinite: torch.Tensor | int = 0
        self._depth = 0
        #: Parameters by group, which the optimizer does not see in a step that releases nothing.
        self._hidden: list[list[Any]] = []
        #: Tables whose rows of padding have no gradient and so need no noise; and these rows' values before a release.
        self._tables: list[Any] | None = None
        self._padding: list[torch.Tensor] = []
        self._withheld: _WithheldLoss | None = None
        method = stages.method
        self._selects, self._adapts = method.selects, method.count_noise_std is not None
        #: Trained parameters, and those of the optimizer that were found to be among them.
        self._declared: tuple[Any, list[torch.Tensor]] = None, []
        #: The policy whose noise was found to be enough for all steps.
        self._checked_policy: Policy | None = None
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        # What other hooks make of gradients is made of released ones.
        cast(Any, optimizer._optimizer_step_pre_hooks).move_to_end(self._hooks[0].id, last=False)
        self._releases = follow_releases(optimizer)
        self._scales = getattr(optimizer, _FUSED, False)
        setattr(optimizer, _FUSED, False)

    def expect_state(self) -> None:
        """A private run's checkpoint is being loaded, and the optimizer's state with it, before or after."""
        self._expects_state, self._foreign_state = True, False

    def _after_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._foreign_state = not (self._expects_state or _is_initial(optimizer, _state_values(optimizer)[0]))

    def remove(self) -> None:
        """Leave the optimizer and its schedules alone again."""
        for hook in self._hooks:
            hook.remove()
        _LEFT.pop(self._optimizer, None)
        if not (self._expects_state or self._foreign_state):
            # What was loaded since the latest release may be anyone's.
            _LEFT[self._optimizer] = _state_values(self._optimizer)
        forget_releases(self._optimizer)
        setattr(self._optimizer, _FUSED, self._scales)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Torch's hook; returns the arguments of `step`, with a closure that has been run in the place of one that has not."""
        # torch hands the optimizer itself as the first argument.
        if len(args) == 1 and not kwargs:
            self._release_if_complete(optimizer)
            return None
        if any(isinstance(given, (torch.Tensor, float)) for given in (*args[1:], *kwargs.values())):
            raise ValueError(_READS)
        closure = next((given for given in (*args[1:], kwargs.get("closure")) if given is not None), None)
        if closure is None or isinstance(closure, _EvaluatedClosure):
            self._release_if_complete(optimizer)
            return None
        # The release needs the closure's backward pass, and the optimizers that are served call a closure once.
        with torch.enable_grad():
            evaluated = _EvaluatedClosure(self._withhold(optimizer, closure()))
        self._release_if_complete(optimizer)
        return (args[0], evaluated), {name: value for name, value in kwargs.items() if name != "closure"}

    def _withhold(self, optimizer: torch.optim.Optimizer, loss: Any) -> Any:
        """The loss of a closure, which somebody's own step may hand on and not read; torch's own steps do no more."""
        own = type(optimizer).step.__module__.startswith(("torch.optim", "fastdp.optim"))
        if own or not isinstance(loss, torch.Tensor):
            return loss
        self._withheld = loss.as_subclass(_WithheldLoss)
        return self._withheld

    def _release_if_complete(self, optimizer: torch.optim.Optimizer) -> None:
        engine = self._stages.engine
        others = engine.pending.clear()
        if engine.backwards == engine.followed:
            if self._depth > 0:
                # The step of a subclass calls its parent's, and torch runs the hooks for each.
                self._depth += 1
                return
            if not self._model.training:
                raise RuntimeError(_EVALUATES)
            gradients = [parameter.grad for parameter in engine.parameters.values()]
            # What a release or zero_grad() left is no sign of another backward pass.
            if engine.tickets and any(gradient is not None and bool(gradient.any()) for gradient in gradients):
                raise RuntimeError(_PARTS)
            raise RuntimeError("step() without backward(): call backward() on the loss of this batch first")
        self._depth = 1
        # The step before may have failed.
        self._show_parameters(optimizer)
        # Other hooks run before it, whenever they were registered.
        cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(self._hooks[1].id)
        with gc_paused():
            self._release(optimizer, others)

    def _release(self, optimizer: torch.optim.Optimizer, others: bool) -> None:
        """Release the logical batch, if it is whole, after what must be looked at; ``others`` are gradients not clipped."""
        engine, release = self._stages.engine, self._stages.release
        self._refuse_unclipped(optimizer, others)
        self._refuse_left_out()
        self._refuse_resized()
        try:
            cast(Checks, engine.checks).state.require_settled(engine.parameters)
        except RuntimeError as error:
            raise RuntimeError(f"{error} {self._spent()}") from error
        engine.followed = engine.backwards
        self.done = engine.complete
        if not engine.complete:
            # An optimizer may decay weights that have no gradient, or require one.
            self._hidden = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = []
            return
        accumulator = engine.accumulator
        alone = self._ranks.size == 1 and not engine.weights.cut
        with nullcontext() if alone else engine.synchronized(self._shared_state(accumulator.policy)):
            if self._foreign_state:
                raise RuntimeError(_STATE_LOADED)
            self._require_noise(accumulator.policy)
            if not engine.checks.enabled and self._ledger.noted(UNCHECKED) is None:
                # Kept with the spending, so that the card says so of a run that goes on with checks as well.
                self._ledger.note(UNCHECKED, "self_check=False")
            if self._ranks.size > 1:
                # Ranks meet once: what the first could not write, all are told here.
                self._ledger.reserve_next()
        self._expects_state = False
        if not alone:
            accumulator.merge(self._ranks)
        self.nonfinite = self.nonfinite + accumulator.nonfinite
        for observer in self._observers:
            observer.before_release(accumulator)
        # Last of all, whatever looked on: this policy's noise is what is drawn.
        accumulator.require_one_clip()
        self._require_noise(accumulator.policy)
        # Whoever else looks on before the step, a hook or an observer, wants to see gradients.
        alone = len(optimizer._optimizer_step_pre_hooks) == 1 and not engine.penalty.expected
        unseen = alone and not self._observers
        update = optimizer.noisy_update() if unseen and hasattr(optimizer, "noisy_update") else None
        if self._tables is None:
            self._tables = list(padded_tables(self._model, engine.trace))
        self._padding = [row(table.weight, table.padding_idx).clone() for table in self._tables]
        release(accumulator.sums, accumulator.policy, update=update, aliased=accumulator.aliased)
        if engine.penalty.expected:
            engine.penalty.add()
            cast(Checks, engine.checks).assumptions[PENALTY] = None
        self._releases.count += 1
        for observer in self._observers:
            observer.after_release(accumulator)
        if self._adapts:
            self._adapt()
        accumulator.reset()
        engine.complete = engine.begun = False

    def _shared_state(self, policy: Policy) -> dict[str, Any]:
        """What must be the same on all ranks at a release, so that they go on alike."""
        groups = self._optimizer.param_groups
        numbers = [{k: v for k, v in g.items() if isinstance(v, (bool, int, float, tuple))} for g in groups]
        return {
            "a setting of the optimizer": repr(numbers),
            "the number of releases": self._ledger.spent_steps,
            "the clipping": repr((policy.bounds, policy.stds)),
            "a mask": [writes(mask) for mask in policy.masks.values()],
            f"what {self._stages.method.mechanism} chose": self._stages.chosen,
            "a frozen parameter": [p.requires_grad for p in self._stages.engine.parameters.values()],
        }

    def _require_noise(self, policy: Policy) -> None:
        """Raise RuntimeError before a release with less noise than its event in the ledger has."""
        if policy is self._checked_policy:
            return
        sigma = self._plan.sigma_at(self._ledger.spent_steps)
        # What else is released with the gradient leaves it less, so that its own noise is never the smaller.
        counted = max(sigma, self._stages.method.gradient_multiplier(sigma))
        if policy.bounds and not policy.noise_multiplier >= counted * (1 - 1e-6):
            raise RuntimeError(
                f"The policy's noise multiplier is {policy.noise_multiplier:.6g}, below the {counted:.6g} that "
                "the ledger counts on; nothing was released. Give gradients that much noise."
            )
        # Where the plan's multiplier stays the same, so does what is enough.
        self._checked_policy = policy if len(self._plan.factors) == 1 else None

    def _adapt(self) -> None:
        accumulator, method = self._stages.engine.accumulator, self._stages.method
        std = method.count_noise_std
        if std is None or accumulator.policy.noise_multiplier == 0:
            return
        release, counts = self._stages.release, (float(accumulator.unclipped), float(accumulator.units))
        fraction = noised_fraction(*counts, std, release.expected_batch_size, release.stream)
        accumulator.policy = method.adapted(accumulator.policy, fraction)

    def _refuse_unclipped(self, optimizer: torch.optim.Optimizer, others: bool) -> None:
        """Until a release, every gradient the optimizer would apply is None; one that is not has not been clipped."""
        parameters, every = self._stages.engine.parameters, list[torch.Tensor]()
        for group in optimizer.param_groups:
            every += group["params"]
        declared, seen = self._declared
        if not others and declared is parameters and len(seen) == len(every) and all(map(operator.is_, seen, every)):
            return
        trained = set(map(id, parameters.values()))
        if not others and trained.issuperset(map(id, every)):
            self._declared = parameters, every
            return
        for parameter in every:
            known = id(parameter) in trained
            if not known and self._selects:
                raise ValueError(
                    f"{self._name(parameter)} is frozen and stands in the optimizer's groups: take it out; the method puts in "
                    "what it chooses"
                )
            if parameter.grad is None and (known or not parameter.requires_grad):
                continue
            name = self._name(parameter)
            parameter.grad = None
            if not known:
                raise RuntimeError(f"{UNDECLARED.format(name)} {self._spent()}")
            raise RuntimeError(
                f"{name} holds an unclipped gradient at step(). Return all that the loss reads from forward(); penalize weights "
                "from the first batch on."
            )

    def _refuse_left_out(self) -> None:
        stages = self._stages
        if not self._selects:
            return
        chosen = stages.engine.parameters
        for name, parameter in stages.parameters.items():
            if parameter.requires_grad and name not in chosen:
                raise RuntimeError(
                    f"{name} was unfrozen, and {stages.method.mechanism} did not choose it: freeze it again. {self._spent()}"
                )

    def _current_shapes(self) -> list[torch.Size]:
        return list(map(_SHAPE, self._stages.parameters.values()))

    def _refuse_resized(self) -> None:
        """Resizing sets `.data`, which torch's version counters do not tell."""
        now = self._current_shapes()
        if now == self._shapes:
            return
        for name, shape, size in zip(self._stages.parameters, self._shapes, now):
            if size != shape:
                raise RuntimeError(
                    f"{name} was resized from {list(shape)} to {list(size)}. Resize it before make_private, or call detach() and "
                    f"make_private again. {self._spent()}"
                )
        # The loop has unfrozen more.
        self._shapes = now

    def _spent(self) -> str:
        ledger = self._ledger
        spent, paid = (sum(map(count, ledger.kinds)) for count in (ledger.spent, ledger.budget))
        return f"{spent} of {paid} releases are spent."

    def _name(self, parameter: torch.Tensor) -> str:
        found = {id(p): name for name, p in self._model.named_parameters()}
        return found.get(id(parameter), "a parameter of the optimizer that is not the model's")

    def _show_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        for group, parameters in zip(optimizer.param_groups, self._hidden):
            group["params"] = parameters
        self._hidden = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        if self._withheld is not None:
            self._withheld.stepping = False
        self._show_parameters(optimizer)
        engine = self._stages.engine
        checks = cast(Checks, engine.checks)
        hooks = *optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()
        hooked = any(not str(getattr(hook, "__module__", "")).startswith("fastdp.") for hook in hooks)
        if hooked:
            checks.assumptions[HOOK_WRITES] = None
        if not self.done:
            if hooked:
                checks.state.settle()
            return
        for table, values in zip(self._tables or (), self._padding):
            row(table.weight, table.padding_idx).copy_(values)
        # Torch's fused optimizers count no write.
        torch.autograd.graph.increment_version([p for group in optimizer.param_groups for p in group["params"]])
        with gc_paused():
            checks.state.settle(written=not hooked)
        if self._changes or self._ledger.spent_steps >= self._ledger.budget_steps:
            self._prepare()


def padded_tables(model: torch.nn.Module, trace: Trace | None) -> Iterator[Any]:
    """Trained tables of embeddings with ``padding_idx``, whose row of padding has no gradient as nothing but lookups reads it."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    others = {read.parameter for read in trace.reads if read.operation not in LOOKUPS} if trace else set()
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.padding_idx is not None:
            alone = owners[id(module.weight)] == 1 and f"{name}.weight".lstrip(".") not in others
            if alone and module.weight.requires_grad:
                yield module


def noised_fraction(unclipped: float, units: float, std: float, divisor: float, stream: NoiseStream) -> float:
    """The share of units that were left whole, with noise of standard deviation ``std`` on their count.

    Each unit reports 1/2 or -1/2, so one unit more or less moves the sum by 1/2 (Andrew et al. 2021, section 2.2); taking half
    the expected batch size off the count instead would let it move by 1, for which the noise is too small.

    Args:
        unclipped, units: of the units that took part, those left whole and all.
        divisor: the expected batch size.
    """
    shifted = torch.tensor([unclipped - units / 2], dtype=torch.float32)
    return float(ops.add_noise_(shifted, std, stream)) / divisor + 0.5


#: Torch's name for whether an optimizer divides gradients by a GradScaler's scale itself, which those of a release do not have.
_FUSED = "_step_supports_amp_scaling"


#: What an ended run left in its optimizer's state, and how often torch had counted writes into each tensor.
_LEFT: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[Any], list[int]]] = weakref.WeakKeyDictionary()


def refuse_used_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for an optimizer with a state that neither its settings nor a private run that has ended left there."""
    (values, versions), (left, before) = _state_values(optimizer), _LEFT.get(optimizer, ([], []))
    as_left = len(values) == len(left) and all(map(operator.is_, values, left)) and versions == before
    if not (as_left or _is_initial(optimizer, values)):
        raise ValueError(_WARM)


def _state_values(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[int]]:
    """The values of an optimizer's state, and how often torch counted a write into each that is a tensor."""
    values = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return values, [value._version for value in values if isinstance(value, torch.Tensor)]


def _is_initial(optimizer: torch.optim.Optimizer, values: Sequence[Any]) -> bool:
    """Whether every state is zero or filled with a setting, as Adagrad's are from the start: no example is in it."""
    numbers = {value for group in optimizer.param_groups for value in group.values() if type(value) in (int, float)}

    def constant(value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return value is None or (isinstance(value, (int, float)) and value in (0, *numbers))
        # As the state's own type holds the setting.
        settings = (torch.tensor(number, dtype=value.dtype).item() for number in (0.0, *numbers))
        return any(bool((value == setting).all()) for setting in settings)

    return all(map(constant, values))


class _EvaluatedClosure:
    """A closure that has been run: gives its value, once."""

    def __init__(self, value: Any):
        self.value, self.asked = value, False

    def __call__(self) -> Any:
        if self.asked:
            raise RuntimeError(
                "This optimizer evaluates its closure several times in a step, each of which needs a release. "
                "Use one that takes gradients once."
            )
        self.asked = True
        return self.value


class _WithheldLoss(torch.Tensor):
    """A loss that nothing is computed from, nor read off, until the step is over that it was handed to."""

    stepping = True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(t, cls) and t.stepping for t in tensors((args, kwargs))):
            raise ValueError(_READS)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
