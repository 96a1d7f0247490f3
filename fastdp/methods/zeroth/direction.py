"""A model whose one trained number is how far its weights have moved along a public random direction.

Its loss on example i is (l_i(w + h z) + l_i(w - h z)) / 2 + step * (l_i(w + h z) - l_i(w - h z)) / (2 h), at step = 0. So an
example's gradient is its estimated slope along z. What clips, adds noise, counts and checks gradients does so with this one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fastdp.calls.batches import as_long_as, map_tensors, take_rows, tensors
from fastdp.calls.modes import in_mode
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.loss.losses import LOSSES, LossTerms, combine, intercepted
from fastdp.engine.uses.layout import Ticket

#: The module that holds the trained number, by its name in the model.
NAME = "zeroth_order"


class StepSize(nn.Linear):
    """The trained number, 0 between releases: a weight [1, 1] on slopes [rows, 1]. A model's state dict does not hold it."""

    def __init__(self, device: torch.device):
        super().__init__(1, 1, bias=False, device=device)
        nn.init.zeros_(self.weight)

    def _save_to_state_dict(self, *args: Any) -> None:
        """Nothing: what a release changed is in the weights."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing."""


class RandomDirection:
    """Puts a `StepSize` into a model, and its forward in place of the model's, until `remove`.

    Parameters with ``requires_grad`` are moved along the direction, by ``smoothing`` (h) in either sense. Meanwhile they are
    frozen, and the optimizer's first group holds the step alone. Directions are public: they follow from ``seed``, the
    ``number`` of the release to come, and that of the parameter.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, smoothing: float, seed: int):
        self.model, self.optimizer, self.smoothing, self.seed = model, optimizer, smoothing, seed
        self.number = 0
        self.trained: Mapping[str, nn.Parameter] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._index = {id(p): index for index, p in enumerate(self.trained.values())}
        self._reached: set[int] = set()
        for parameter in self.trained.values():
            parameter.requires_grad_(False)
        self.step = StepSize(next(iter(self.trained.values())).device)
        self._forward, self._own = model.forward, "forward" in model.__dict__
        self._readers = [
            (module, names)
            for module in model.modules()
            if (names := [n for n, p in module._parameters.items() if p is not None and id(p) in self._index])
        ]
        model.add_module(NAME, self.step)
        model.forward = self  # type: ignore[method-assign]
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.param_groups[0]["params"] = [self.step.weight]
        self._hook = optimizer.register_step_post_hook(lambda *_: self._move())

    def remove(self) -> None:
        self._hook.remove()
        for group, own in zip(self.optimizer.param_groups, self._groups):
            group["params"] = own
        delattr(self.model, NAME)
        if self._own:
            self.model.forward = self._forward  # type: ignore[method-assign]
        else:
            del self.model.__dict__["forward"]
        for parameter in self.trained.values():
            parameter.requires_grad_(True)

    def plain(self, twin: nn.Module) -> None:
        delattr(twin, NAME)
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(name in self.trained)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output at w - h z, with the loss described above."""
        if not self.model.training:
            return self._forward(*args, **kwargs)
        with in_mode(self.model, training=False):
            above = self._losses(args, kwargs, 1)[0]
            below, output = self._losses(args, kwargs, -1)
        self._require_reached()
        slopes = (above - below) / (2 * self.smoothing)
        loss = ((above + below) / 2 + self.step(slopes[:, None])[:, 0]).mean()
        if isinstance(output, dict):
            output["loss"] = loss
            return output
        return (loss, *output[1:]) if isinstance(output, tuple) else loss

    def _require_reached(self) -> None:
        missed = [name for name, p in self.trained.items() if id(p) not in self._reached]
        if missed:
            raise ValueError(
                f"{missed[0]} is read outside the forward of the module that holds it, so DPZO cannot move it: freeze it"
            )

    def _losses(self, args: Any, kwargs: Any, sign: int) -> tuple[Tensor, Any]:
        """Each row's loss ``[rows]`` at weights moved by ``sign`` h, without a graph, and the output."""
        call = (args, kwargs)
        rows = next(t.shape[0] for t in tensors(call) if t.dim())
        terms = LossTerms(Ticket(torch.arange(rows), torch.ones(rows), is_last=True).layout(self.step.weight.device))
        # Whoever follows the model's operations need not follow these, nor keep what they make.
        with (
            self._moved(sign),
            intercepted(terms),
            _values(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):
            output = self._forward(*args, **kwargs)
        try:
            losses = combine(_total(output), terms, frozenset(), verify=self.number == 0).detach()
        except UnsupportedUse:
            # A loss of the model's own: that of a row is the model's on that row.
            if rows == 1:
                return _total(output).detach().reshape(1), output
            carriers = as_long_as(call, rows)
            single = (take_rows(call, torch.tensor([row]), carriers) for row in range(rows))
            losses = torch.cat([self._losses(*own, sign)[0] for own in single])
        return losses, output

    @contextmanager
    def _moved(self, sign: int) -> Iterator[None]:
        """Meanwhile each module reads, while it runs and no longer, weights that are moved along the direction."""
        hooks = [hook for module, names in self._readers for hook in self._hooked(module, names, sign * self.smoothing)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooked(self, module: nn.Module, names: list[str], distance: float) -> list[Any]:
        own: dict[str, Any] = module._parameters
        held = {name: own[name] for name in names}

        def move(*_: Any) -> None:
            for name, parameter in held.items():
                self._reached.add(id(parameter))
                own[name] = self.draw(parameter).mul_(distance).add_(parameter.detach())

        def put_back(*_: Any) -> None:
            own.update(held)

        return [
            module.register_forward_pre_hook(move, prepend=True),
            module.register_forward_hook(put_back, always_call=True),
        ]

    def draw(self, parameter: Tensor) -> Tensor:
        """The direction at a parameter, drawn anew each time: i.i.d. normal, from the seed, the release and its number."""
        place = f"{self.seed} {self.number} {self._index[id(parameter)]}".encode()
        generator = torch.Generator(parameter.device)
        generator.manual_seed(int.from_bytes(hashlib.sha256(place).digest()[:7], "big"))
        return torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=parameter.dtype)

    @torch.no_grad()
    def _move(self) -> None:
        """After a release: what the optimizer made of the step is what the weights move by, each group at its own rate."""
        size = self.step.weight
        if size.grad is None:
            return
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        for group, rate in zip(self._groups, rates):
            # A first group at rate 0 makes no step, and the others none with it.
            far = size.reshape(()) * (rate / (rates[0] or 1.0))
            for parameter in group:
                parameter.addcmul_(self.draw(parameter), far.to(parameter.dtype))
        size.zero_()


@contextmanager
def _values() -> Iterator[None]:
    """Meanwhile torch's loss functions report losses of values that no gradient is taken of, too."""
    named = {function.__name__: getattr(F, function.__name__) for function in LOSSES}

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        first = next((t for t in tensors((args, kwargs)) if t.is_floating_point()), None)
        args, kwargs = map_tensors((args, kwargs), lambda t: t.detach().requires_grad_() if t is first else t)
        return function(*args, **kwargs)

    try:
        for name, function in named.items():
            setattr(F, name, functools.partial(called, function))
        yield
    finally:
        for name, function in named.items():
            setattr(F, name, function)


def _total(output: Any) -> Tensor:
    """The loss in a model's output; raises ValueError where there is none."""
    named = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    if not isinstance(named, Tensor) or named.numel() != 1:
        raise ValueError("DPZO needs a model that returns its loss: pass labels to it")
    return named.reshape(())
