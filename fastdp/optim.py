"""Drop-in optimizers: `torch.optim`'s own classes, which take what those take, and apply private gradients alone."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

import fastdp.distributed.pieces as pieces
import fastdp.ops as ops
from fastdp.entry import make_private
from fastdp.ops.adamw import Numbers, adamw_update_
from fastdp.ops.noise import NOISE_DTYPES
from fastdp.ops.stochastic_rounding import float32_moments
from fastdp.private.registry import drives
from fastdp.private.release import ClippedSums, Update
from fastdp.private.run import Private

#: What torch's own step keeps moments in, of parameters of the same dtype.
_WIDE = {torch.float32, torch.float64}
_DTYPE, _COUNTED_IN = operator.attrgetter("dtype"), operator.attrgetter("device", "dtype")


class _PrivateOptimizer:
    """Common to the three: torch's optimizer, made private by `make_private` or here, and of no use before that.

    Args:
        params: parameters or groups of them, as torch takes them; or a model, whose trained parameters are meant.
        lr and the like: as in torch, by position or by name, for all groups that do not state their own.
        data_loader: a DataLoader. With it the optimizer is private at once, and ``optimizer.data_loader`` is what to iterate
            over; without it, give the optimizer to `fastdp.make_private`. After a model it may stand second.
        model: beside ``data_loader``, where ``params`` are not a model.
        privacy: further keyword arguments of `fastdp.make_private`.

    Raises:
        TypeError: for privacy keywords without a model and a data_loader.
    """

    private: Private | None = None

    def _initialise(
        self,
        kind: type[torch.optim.Optimizer],
        params: Any,
        args: tuple[Any, ...],
        options: dict[str, Any],
        **defaults: Any,
    ) -> None:
        model, loader = options.pop("model", None), options.pop("data_loader", None)
        if isinstance(params, torch.nn.Module):
            model, params = params, [p for p in params.parameters() if p.requires_grad]
            if not params:
                raise ValueError("the model has no trained parameter: every requires_grad is False")
            if args and not isinstance(args[0], (float, int, torch.Tensor)):
                loader, args = args[0], args[1:]
        theirs = inspect.signature(kind.__init__).parameters
        by_position = list(theirs)[2 : 2 + len(args)]
        options = {name: default for name, default in defaults.items() if name not in by_position} | options
        privacy = {name: options.pop(name) for name in options.keys() - theirs.keys()}
        kind.__init__(self, params, *args, **options)  # type: ignore[arg-type]
        if loader is not None and model is not None:
            self.private = make_private(model, self, loader, **privacy)  # type: ignore[arg-type]
        elif loader is not None or privacy:
            raise TypeError(
                f"{type(self).__name__} is private at once only with model and data_loader: give both beside "
                f"{next(iter(privacy), 'data_loader')}, or give all of them to fastdp.make_private instead"
            )

    @property
    def data_loader(self) -> Any:
        """The private loader; iterate over this one."""
        if self.private is None:
            raise RuntimeError(
                "this optimizer was given no data_loader: iterate over the one that make_private returns"
            )
        return self.private.data_loader

    def step(self, closure: Any = None) -> Any:
        """As torch's, for gradients that were clipped and noised. Raises RuntimeError before the optimizer is private."""
        if not drives(self):
            raise RuntimeError(
                f"this {type(self).__name__} is not private yet, and its step would train on gradients as they are: give it to "
                "fastdp.make_private, or use torch.optim's"
            )
        return _without_hooks(super().step.__func__)(self, closure)  # type: ignore[misc]


def _without_hooks(step: Any) -> Any:
    """``step`` without the wrapper that torch puts round that of every class with instances, which would run hooks twice."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class SGD(_PrivateOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with private gradients.

    Args:
        params, model, data_loader, privacy: parameters or groups, or a model and its loader; the rest as in
            `fastdp.make_private`.
        lr, momentum, dampening, weight_decay, nesterov: as in torch.
    """

    def __init__(self, params: Any, *args: Any, **options: Any):
        self._initialise(torch.optim.SGD, params, args, options)


#: Whether torch's AdamW knows weight decay of both kinds, as it does since it is an Adam (2.7).
_KNOWS_BOTH = issubclass(torch.optim.AdamW, torch.optim.Adam)


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, which can draw the noise of a release within its update, and keep moments and copies in another dtype."""

    fused: bool = True
    #: Keep a float32 copy of each parameter of half precision, and update that.
    master_weights: bool = False
    #: What moments are kept in: float32, or bfloat16, rounded at random.
    moments: torch.dtype = torch.float32

    def noisy_update(self) -> Update | None:
        """What takes this step on a sum and its noise in one pass, as the groups are now; None with ``fused`` off."""
        if not self.fused:
            return None
        return partial(self._noisy_update, {id(p): group for group in self.param_groups for p in group["params"]})

    @torch.no_grad()
    def _noisy_update(
        self,
        group_of: dict[int, dict[str, Any]],
        summed: ClippedSums,
        take: Callable[[Sequence[int]], torch.Tensor],
        *,
        divisor: float,
        secure_rounding: bool,
    ) -> Sequence[int]:
        """As `Update`, by `fastdp.ops.adamw_noise_steps_`: parameters that share their numbers are one call.

        Returns those that are left: with weight decay of Adam's kind or another option that the op lacks, strided, or pieces
        that begin within a block of noise.
        """
        parameters, totals, stds, tensor_ids, every_axes = summed
        groups = [*map(group_of.get, map(id, parameters))]
        served = {id(group): _is_fusable(group) for group in self.param_groups}
        # One of each type: a step should not ask every parameter.
        cut = any(map(pieces.is_dtensor, {type(p): p for p in parameters}.values()))
        firsts = [*map(pieces.first, parameters)] if cut else [0] * len(parameters)
        own_of: Callable[[torch.Tensor], torch.Tensor] = pieces.to_local if cut else lambda tensor: tensor
        fused = [
            group is not None and served[id(group)] and p.dtype in NOISE_DTYPES and p.is_contiguous() and not first % 16
            for group, p, first in zip(groups, parameters, firsts)
        ]
        members = [*itertools.compress(range(len(parameters)), fused)]
        states = dict(zip(members, self._states_of([parameters[at] for at in members])))
        # What parameters share that are served together.
        shared = zip(map(id, groups), stds, [axes is None for axes in every_axes])
        kinds = [(*own, "master" in states[at]) for at, own in enumerate(shared) if fused[at]]
        for alike in _by_kind(members, kinds):
            for step, own in _by_step_count(alike, [states[at]["step"] for at in alike]):
                group, their = groups[own[0]], [states[at] for at in own]
                axes = [(at, found) for at in own if (found := every_axes[at]) is not None]
                assert group is not None
                ops.adamw_noise_steps_(
                    [own_of(parameters[at]) for at in own],
                    [totals[at] for at in own],
                    [own_of(state["exp_avg"]) for state in their],
                    [own_of(state["exp_avg_sq"]) for state in their],
                    stds[own[0]],
                    take([tensor_ids[at] for at in own]),
                    masters=[own_of(state["master"]) for state in their if "master" in state],
                    divisor=divisor,
                    lr=float(group["lr"]),
                    betas=(float(group["betas"][0]), float(group["betas"][1])),
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=step,
                    secure_rounding=secure_rounding,
                    rows=[pieces.part(found.rows.float(), parameters[at]) for at, found in axes],
                    columns=[found.columns.float() for _, found in axes],
                    firsts=[firsts[at] for at in own],
                )
        return [at for at, taken in enumerate(fused) if not taken]

    def _states_of(self, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Torch's own states of parameters, begun where they are new."""
        known = self.state
        # Nearly always they are all that there are, in this order: to look one up takes the host as long as what is made of it.
        if len(known) == len(parameters) and all(map(operator.is_, known, parameters)):
            states = [*known.values()]
            kept = {*map(_DTYPE, [state[name] for name in ("exp_avg", "exp_avg_sq") for state in states if state])}
            if kept == {self.moments} and not self.master_weights and all(map(_has_no_master, states)):
                return states
        return [self._state_of(parameter) for parameter in parameters]

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Torch's own state of a parameter, begun if it is new; the dtype of moments does not depend on its own."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moments)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.moments)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        if mean.dtype is square.dtype is self.moments and not (self.master_weights or "master" in state):
            return state
        if self.master_weights and parameter.dtype != torch.float32 and "master" not in state:
            state["master"] = parameter.detach().float()
        for name, dtype in (("exp_avg", self.moments), ("exp_avg_sq", self.moments), ("master", torch.float32)):
            # Torch gives what it loads from a checkpoint the parameter's dtype.
            if name in state and state[name].dtype != dtype:
                state[name] = state[name].to(dtype)
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step, as torch's; in float32 where torch's own would not keep moments and copies in their dtypes."""
        if self._torch_supports():
            return _without_hooks(torch.optim.AdamW.step)(self, closure)
        for group in self.param_groups:
            _check_plain(group)
        loss = None if closure is None else closure()
        every = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for number, (group, parameter) in enumerate(every):
            if parameter.grad is not None:
                self._step_in_float32(number, parameter, group, *group["betas"])
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group says where its weight decay belongs, which torch's own groups say from 2.7 on."""
        super().add_param_group({"decoupled_weight_decay": True, **param_group})
        group = self.param_groups[-1]
        if self.moments != torch.float32 or not {*map(_DTYPE, group["params"])} <= _WIDE:
            _check_plain(group)

    def _torch_supports(self) -> bool:
        """Whether torch's own step does what the groups ask for."""
        groups = self.param_groups
        if not _KNOWS_BOTH and any(group["weight_decay"] and not group["decoupled_weight_decay"] for group in groups):
            return False
        applied = [p for group in groups for p in group["params"] if p.grad is not None]
        # Of other dtypes torch's own step would not keep the moments in theirs.
        return not applied or ({*map(_DTYPE, applied)} <= _WIDE and self.moments == torch.float32)

    def _step_in_float32(
        self, number: int, parameter: torch.Tensor, group: dict[str, Any], beta1: float, beta2: float
    ) -> None:
        state = self._state_of(parameter)
        assert parameter.grad is not None
        target, gradient = pieces.to_local(state.get("master", parameter)), pieces.to_local(parameter.grad).float()
        state["step"] += 1
        step, decay = int(state["step"]), group["weight_decay"]
        if not group["decoupled_weight_decay"]:
            gradient, decay = gradient.add(target.float(), alpha=decay), 0.0
        numbers = Numbers(0.0, 1.0, float(group["lr"]), beta1, beta2, group["eps"], decay, step, False)
        kept = pieces.to_local(state["exp_avg"]), pieces.to_local(state["exp_avg_sq"])
        with float32_moments(*kept, (number, step)) as moments:
            adamw_update_(target, gradient, *moments, numbers)
        if "master" in state:
            pieces.to_local(parameter).copy_(target)


def _check_plain(group: dict[str, Any]) -> None:
    """Refuse a group with an option that the step in float32 lacks, and would leave out in silence."""
    if group["amsgrad"] or group["maximize"]:
        raise ValueError(
            "amsgrad and maximize need float32 parameters and moments, and with Adam's weight decay torch 2.7: turn them off"
        )


def _is_fusable(group: dict[str, Any]) -> bool:
    """Whether the fused step does what a group's options ask for."""
    if group["amsgrad"] or group["maximize"] or group["differentiable"]:
        return False
    return not group["weight_decay"] or group["decoupled_weight_decay"]


def _has_no_master(state: dict[str, Any]) -> bool:
    return bool(state) and "master" not in state


def _by_kind(members: list[int], kinds: list[tuple[Any, ...]]) -> Collection[list[int]]:
    """Members of each kind, in order."""
    if len(set(kinds)) == 1:
        return [members]
    found: dict[tuple[Any, ...], list[int]] = {}
    for at, kind in zip(members, kinds):
        found.setdefault(kind, []).append(at)
    return found.values()


def _by_step_count(members: list[int], counts: list[torch.Tensor]) -> list[tuple[int, list[int]]]:
    """Members whose steps have one number, with it: one more than torch's own counts in their states, which are raised."""
    if len({*map(_COUNTED_IN, counts)}) > 1:
        torch._foreach_add_(counts, 1)
        steps = [int(count) for count in counts]
    else:
        # As a tensor: a number is made one anew for each count, which takes the host three times as long.
        torch._foreach_add_(counts, torch.ones((), dtype=counts[0].dtype, device=counts[0].device), alpha=1)
        steps = [*map(int, torch.stack(counts).tolist())]
    numbers = dict.fromkeys(steps)
    if len(numbers) == 1:
        return [(steps[0], members)]
    return [(step, [at for at, own in zip(members, steps) if own == step]) for step in numbers]


class AdamW(_PrivateOptimizer, FusedAdamW):
    """`torch.optim.AdamW` with private gradients.

    Args:
        params, model, data_loader, privacy: parameters or groups, or a model and its loader; the rest as in
            `fastdp.make_private`.
        lr, betas, eps, weight_decay: as in torch.
        fused: draw the noise within the update, in one pass over memory; the gradients of parameters then stay None. False,
            or a hook of yours before the step: noisy gradients are set first, as by any other optimizer.
        master_weights: keep a float32 copy of each parameter of half precision and update that, so that small updates are
            not lost in rounding. A checkpoint holds copies and moments in the parameter's own precision.
        moments: dtype of both moments, whatever the parameters': ``torch.float32``, or ``torch.bfloat16`` for half the memory,
            which torch's own takes for parameters of half precision. They are rounded up or down at random: to nearest, a second
            moment whose decay is .999 could grow but not shrink.

    Raises ValueError for another dtype of moments.
    """

    def __init__(
        self,
        params: Any,
        *args: Any,
        fused: bool = True,
        master_weights: bool = False,
        moments: torch.dtype = torch.float32,
        **options: Any,
    ):
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments is {moments}: keep them in torch.float32 or in torch.bfloat16")
        self.fused, self.master_weights, self.moments = fused, master_weights, moments
        self._initialise(torch.optim.AdamW, params, args, options)


class Adam(_PrivateOptimizer, FusedAdamW):
    """`torch.optim.Adam` with private gradients: AdamW's arithmetic with weight decay added to the gradient.

    Args as for `AdamW`; ``weight_decay`` is 0 by default; above 0 the update is not fused.
    """

    def __init__(self, params: Any, *args: Any, fused: bool = True, master_weights: bool = False, **options: Any):
        self.fused, self.master_weights = fused, master_weights
        self._initialise(torch.optim.AdamW, params, args, options, weight_decay=0.0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; in every group weight decay belongs to the gradient."""
        super().add_param_group({**param_group, "decoupled_weight_decay": False})


class ChainedOptimizer(torch.optim.Optimizer):
    """Optimizers of different parameters of a model that step as one, as Muon for its matrices and AdamW for the rest.

    Call the ``step()`` of this one alone. Schedules may be of this one or of one of them.

    >>> import torch, fastdp
    >>> model = torch.nn.Linear(4, 2)
    >>> sgd = torch.optim.SGD([model.weight], lr=0.02)
    >>> optimizer = fastdp.optim.ChainedOptimizer(sgd, torch.optim.AdamW([model.bias], lr=1e-3))
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.02, 0.001]

    Raises ValueError for a parameter that two of them hold.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for own in optimizers for group in own.param_groups], {})
        for own in optimizers:
            self.state.update(own.state)
            own.chain = self  # type: ignore[attr-defined]
        self._share()

    def _share(self) -> None:
        """Let each optimizer have its groups and its states among those of all."""
        groups = iter(self.param_groups)
        for own in self.optimizers:
            own.state, own.param_groups = self.state, [next(groups) for _ in own.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step each optimizer, after one call of ``closure``."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for own in self.optimizers:
            own.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's."""
        super().load_state_dict(state_dict)
        self._share()
