"""Follow which tensors of a forward pass are computed from the data, and what each module returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdp.calls.batches import Call, RowNumbers, tensors
from fastdp.calls.marks import Marks
from fastdp.calls.named import functions, is_metadata
from fastdp.calls.randomness import DropoutDisabled, preserve_rng

_RANKING = functions("topk")
_SCANNING = _RANKING | functions("cumsum cumprod cummax cummin logcumsumexp")
#: Only the first argument of these has an axis of tokens. The others are stacked weights, and where groups end.
GROUPED = functions("grouped_mm _grouped_mm")


class DataFlow(TorchFunctionMode):
    """Marks the tensors that one forward pass computes from the data.

    Args:
        inputs: the tensors that carry rows.

    Attributes:
        data: tensors computed from the inputs.
        cut: those of them that may depend on other rows: values selected by position or rank in a batch, as an expert with a
            capacity keeps the first tokens that reach it.
        listed: whether an input is a plain list. An operation without tensor arguments may then have read it.
    """

    def __init__(self, inputs: Iterable[torch.Tensor]):
        super().__init__()
        inputs = list(inputs)
        self.data: Marks[None] = Marks((t, None) for t in inputs)
        self.cut: Marks[None] = Marks()
        self.listed = any(isinstance(t, RowNumbers) for t in inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_metadata(func):
            self.follow(func, args, kwargs, tensors((args, kwargs)), out)
        return out

    def follow(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Mark what one operation returned. True if any of its arguments was computed from the data."""
        found = self.data.has_any(given) or (self.listed and not given)
        # What is written into becomes data too.
        for result in (given[:1] if func is torch.Tensor.__setitem__ else tensors(out)) if found else ():
            self.data[result] = None
        if found and (_cuts(func, args, kwargs) or self.cut.has_any(given[:1] if func in GROUPED else given)):
            for result in tensors(out):
                self.cut[result] = None
        return found


def _cuts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation slices, scans or ranks the first axis, so that an entry's result depends on how many precede it."""
    if func is torch.Tensor.__getitem__:
        first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return isinstance(first, slice) and first != slice(None)
    if func not in _SCANNING:
        return False
    dims = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, int) and not isinstance(v, bool)]
    dim = kwargs.get("dim", dims[-1] if dims and (len(dims) > 1 or func not in _RANKING) else -1)
    return not args[0].dim() or dim % args[0].dim() == 0


def module_outputs(
    model: torch.nn.Module, forward: Callable[..., Any], call: Call, row: int
) -> dict[str, torch.Tensor]:
    """What each module returns for a row in one pass without dropout."""
    seen: dict[str, torch.Tensor] = {}

    def record(name: str, output: object) -> None:
        found = next(iter(tensors(output)), None)
        if found is not None and found.dim() > 0 and found.shape[0] > row and found.is_floating_point():
            seen.setdefault(name, found.detach()[row].clone())

    modules = [(n, m) for n, m in model.named_modules() if n and not isinstance(m, torch.jit.ScriptModule)]
    handles = [m.register_forward_hook(lambda _m, _i, output, name=n: record(name, output)) for n, m in modules]
    try:
        with preserve_rng(model), DropoutDisabled(), torch.no_grad():
            forward(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    return seen
