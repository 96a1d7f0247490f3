"""Where the user's `backward()` enters the engine: at the model's loss and outputs (`OutputBoundary`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch

from fastdp.calls.batches import map_tensors, tensors
from fastdp.engine.uses.logits import Logits
from fastdp.engine.uses.use import ForbidBackward, Use

LACKS_LOSS = "the model returned no loss of what is trained: pass labels to it, or give make_private criterion="


class Junction:
    """Where the backward passes of one batch's forward passes meet: autograd comes here after all that a loss is made of.

    Args:
        enter: takes each pass that the loss has reached, with the gradient that it brought.
    """

    def __init__(self, enter: Callable[[list[tuple[Any, Any]]], None]):
        self.enter = enter
        #: The passes that were reached so far.
        self.arrived: list[tuple[Any, Any]] = []
        self._anchor: torch.Tensor | None = None

    def anchor(self, like: torch.Tensor) -> torch.Tensor:
        """What a boundary takes, so that autograd goes on from it to here."""
        if self._anchor is None:
            leaf = torch.zeros((), device=like.device, requires_grad=True)
            # A weak reference: Python does not collect a cycle through an autograd node.
            self._anchor = _Join.apply(leaf, weakref.ref(self))
        return self._anchor


class _Join(Use):
    """Autograd runs its backward after that of every boundary that the loss reached."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, junction: Callable[[], Junction]) -> Any:
        ctx.junction = junction
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        junction = ctx.junction()
        found, junction.arrived = junction.arrived, []
        junction.enter(found)
        return None, None


def require_positive(upstream: torch.Tensor) -> float:
    """What the loop scaled a loss by; ValueError for zero or less: such a choice may depend on the whole batch."""
    if not (scale := float(upstream)) > 0:
        raise ValueError(
            f"The loss was scaled by {scale} before backward(). The scale must be positive: change signs in each row's own loss."
        )
    return scale


class OutputBoundary(Use):
    """The model's loss and outputs, whose backward tells their `Junction` that the loop's loss has reached this pass, and how.

    They come in a list, which hides them from autograd: it would continue into the graph that the engine has freed.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, enter: Callable[..., None], outputs: list[torch.Tensor]) -> Any:
        ctx.enter = enter
        ctx.set_materialize_grads(False)
        return tuple(map(torch.Tensor.detach, outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.enter(gradients)
        return None, None, None


class OutputSeeds(Use):
    """A scalar whose backward pass goes on at the outputs with ``gradients``, which the caller fills in; it keeps no output."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor | None], *outputs: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *ctx.gradients


@contextmanager
def take_gradients(
    parameters: Iterable[torch.nn.Parameter], take: Callable[[int, torch.Tensor], None]
) -> Iterator[None]:
    """Call ``take`` with the index and gradient of each parameter when it is ready, and leave every `.grad` as it was."""
    parameters = list(parameters)
    kept = [p.grad for p in parameters]
    handles = []
    for index, parameter in enumerate(parameters):
        parameter.grad = None

        def arrived(p: torch.Tensor, index: int = index) -> None:
            gradient, p.grad = p.grad, None
            if gradient is not None:
                take(index, gradient)

        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(arrived))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, gradient in zip(parameters, kept):
            parameter.grad = gradient


@contextmanager
def gradient_hooks_disabled(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Disable the user's gradient hooks: the gradients in here are those of single examples, which no hook may see."""
    every = (own for p in parameters for own in (p._backward_hooks, p._post_accumulate_grad_hooks) if own)
    held = [(own, dict(own)) for own in every]
    for own, _ in held:
        own.clear()
    try:
        yield
    finally:
        for own, kept in held:
            own.update(kept)


def plain_gradients(
    tops: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    *,
    keep: Callable[[int, torch.Tensor], Any] = lambda index, gradient: gradient,
    retain: bool = False,
) -> list[Any]:
    """Gradients of the parameters, by a backward pass whose `.grad` are put back as they were.

    ``keep`` makes of a gradient, as soon as it is there, what is returned in its place; its first argument is its number.

    Under reentrant checkpointing `torch.autograd.grad` raises, or misses what lies inside the checkpointed pieces.
    """
    parameters = list(parameters)
    found: list[Any] = [None] * len(parameters)

    def take(index: int, gradient: torch.Tensor) -> None:
        own = keep(index, gradient)
        found[index] = own if found[index] is None else found[index] + own

    with take_gradients(parameters, take):
        torch.autograd.backward(tops, seeds, retain_graph=retain)
    return found


def find_loss(output: Any, *, only: bool = False) -> torch.Tensor | None:
    """The scalar loss in what a model returned: a scalar, ``loss`` by name, the first of a tuple, or the first scalar in it.

    Raises ValueError for a ``loss`` that is not a scalar, and for several scalars without that name if it is the ``only`` one.
    """
    if isinstance(output, torch.Tensor):
        return output if output.dim() == 0 and output.requires_grad else None
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    loss = first if isinstance(first, torch.Tensor) and first.dim() == 0 else named
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        scalars = {id(t): t for t in tensors(output) if t.dim() == 0 and t.requires_grad}
        if only and len(scalars) > 1:
            raise ValueError(
                f"The model returned {len(scalars)} scalars that require gradients. Return their sum as 'loss', or detach "
                "all but one."
            )
        # Only without a scalar: outputs of one row may have one number too.
        alone = isinstance(first, torch.Tensor) and first.numel() == 1 and first.requires_grad
        return next(iter(scalars.values()), first if alone else None)
    if loss.numel() != 1:
        raise ValueError(
            f"the model's loss has shape {list(loss.shape)}, not that of a scalar: let the model average it over the examples"
        )
    return loss


def require_loss(output: Any, *, only: bool = False) -> torch.Tensor:
    """The scalar loss in what a model returned; ValueError where there is none."""
    if (loss := find_loss(output, only=only)) is None:
        raise ValueError(LACKS_LOSS)
    return loss


def forbid_backward(output: Any, reason: str) -> Any:
    """The same output, of which a backward pass raises RuntimeError with this reason."""
    return map_tensors(output, lambda t: ForbidBackward.apply(t, reason) if t.requires_grad else t)


def replace_loss(output: Any, loss: torch.Tensor, beside: Mapping[int, torch.Tensor] = {}) -> Any:
    """The same output around another loss, and other tensors in the place of those ``beside`` it, by identity.

    A term that is made of its other tensors raises RuntimeError in backward().
    """
    replaced = {**beside, id(find_loss(output)): loss}

    def replacement(t: torch.Tensor) -> Any:
        if id(t) in replaced:
            return replaced[id(t)]
        # What no loss may use raises in backward(); `Logits` do so themselves.
        harmless = isinstance(t, Logits) or not (t.requires_grad and t.is_floating_point())
        return t if harmless else ForbidBackward.apply(t)

    if isinstance(output, dict):
        for key, value in output.items():
            output[key] = map_tensors(value, replacement)
        return output
    if isinstance(output, (torch.Tensor, tuple, list)) or is_dataclass(output):
        return map_tensors(output, replacement)
    output.loss = loss
    return output
