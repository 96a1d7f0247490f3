"""A model in training or in evaluation for a while, and what may be in training at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.distributed.shards import read_dtypes


@contextmanager
def kept_modes(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards each module is in the mode that it was in: some may be frozen in evaluation, within a model that trains."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def in_mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """The model in this mode, and afterwards each of its modules in its own."""
    with kept_modes(model):
        model.train(training)
        yield


def autocast_now(device: torch.device) -> AbstractContextManager[Any]:
    """What sets autocast to what it is now."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


#: Layers that are the same in both modes.
_MODELESS = (torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)


class LoadedMode:
    """Tell the evaluation mode that `from_pretrained` leaves a model in from a later choice of the user's.

    Torch does not say who set a mode. So one layer whose forward knows no mode is put into training mode: `model.eval()` puts
    it back, and until then nobody has called it.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        name = getattr(getattr(model, "config", None), "_name_or_path", "")
        loaded = bool(name) and not any(module.training for module in model.modules())
        self._marked = next((m for m in model.modules() if type(m) in _MODELESS), None) if loaded else None
        if self._marked is not None:
            self._marked.training = True

    def end(self, *, train: bool) -> None:
        """Give the layer its mode back, or put a model into training mode that nobody has called `eval` of since."""
        marked, self._marked = self._marked, None
        if marked is not None and marked.training and not self._model.training:
            self._model.train(train)


def refuse_mixing(model: torch.nn.Module) -> None:
    """Raise ValueError for a batch normalisation, unless it scales by known numbers alone: in eval mode, with statistics, frozen.

    Asked again when modes have changed: a loop's own ``model.train()`` reaches frozen modules too.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            continue
        frozen = not any(p.requires_grad for p in module.parameters())
        if module.training or module.running_mean is None or not frozen:
            raise ValueError(
                f"{name} is a batch normalisation, which mixes examples; use group or layer norm, or freeze it: "
                "requires_grad=False, and eval mode after each model.train()"
            )


class LowPrecisionDetector(TorchFunctionMode):
    """Notes whether a model computes in less than float32, as under an autocast of its own."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= isinstance(out, torch.Tensor) and out.requires_grad and out.dtype.itemsize < 4
        return out


#: How far a loss may move, relative to its size, when only the shapes around an example change.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4}
_LOW_PRECISION = 5e-2
#: The share of it for losses of ordinary size on a processor: only one that nearly vanishes moves as far by rounding.
_ORDINARY, _VANISHING = 0.1, 1e-2


def rounding(model: torch.nn.Module, loss: float = 0.0, *, low: bool = False) -> float:
    """The relative change of a loss of this size that counts as rounding; ``low``: of a model that computes below float32."""
    device = next(model.parameters()).device.type
    if low or torch.is_autocast_enabled(device):
        return _LOW_PRECISION
    most = max((_ROUNDING.get(kind, _LOW_PRECISION) for kind in read_dtypes(model)), default=_LOW_PRECISION)
    exact = device == "cpu" and torch.get_float32_matmul_precision() == "highest" and most < _LOW_PRECISION
    return most * min(1.0, max(_ORDINARY, _VANISHING / max(loss, 1e-30))) if exact else most
