"""Layer-wise relevance propagation as rules for backward passes through stock models.

The backward pass carries messages s = R / z, the relevance of an activation over its value. For a linear map
z_i = sum_j x_j w_ji + b_i equation 6 reads s_j = sum_i w_ji s_i: the ordinary backward pass. The relevance of an input is x s
(equation 6), that of a parameter its value times what autograd calls its gradient (equation 13). What is not linear gets a
backward rule of its own while the model's forward runs:

* activations and softmax hand on the relevance of each element (s_in = s y / x);
* products of two activations halve the message, residual sums rescale theirs by branch: the normalisation of equation 11;
* layer and RMS norms are linear maps once their root is held.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2CLS

from fastdp.calls.composite import opened
from fastdp.methods.removed import replace_removed
from fastdp.validate import at_least

#: Keeps quotients of functions that vanish at 0 finite there; too small to absorb relevance.
_TINY = 1e-9


@replace_removed
@dataclass(frozen=True)
class Propagation:
    """The rule for linear layers, alpha-beta (equation 4), and the stabiliser of other denominators.

    Args:
        epsilon: added to the denominators of the model's output and of softmax, in the units of the activation; what it
            absorbs is lost to conservation.
        alpha: weight of the positive contributions; beta is 1 - alpha. The paper's experiments take 0.5 (section VII-D).
        positive_after_activation: a linear layer that reads an activation's output hands relevance to its positive
            contributions alone, the subset q of equation 7.
    """

    epsilon: float = 1e-3
    alpha: float = 0.5
    positive_after_activation: bool = False

    def __post_init__(self) -> None:
        at_least(0.0, epsilon=self.epsilon, alpha=self.alpha)


def stabilised(z: torch.Tensor, epsilon: float) -> torch.Tensor:
    """z + epsilon sign(z), with sign(0) = 1."""
    return z + torch.copysign(z.new_tensor(epsilon), z)


def track_relevance(values: torch.Tensor) -> torch.Tensor:
    """Let relevance flow through values that the model reads or looks up, and end there."""
    return values if values.requires_grad else values.requires_grad_()


class _Elementwise(torch.autograd.Function):
    """y = f(x) element by element (softmax included), with R_x = R_y: the message becomes s y / x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, y: torch.Tensor, epsilon: float = _TINY, activation: bool = True
    ) -> torch.Tensor:
        ctx.epsilon, ctx.activation = epsilon, activation
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *messages: Any) -> Any:
        x, y = ctx.saved_tensors
        return (messages[0] * y / stabilised(x, ctx.epsilon)).to(x.dtype), None, None, None


#: Nodes of autograd that leave values as they are, in another shape.
_RESHAPED = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0", "AliasBackward0")


def _of_activation(value: torch.Tensor) -> bool:
    """Whether a value is what an activation function returned, if in another shape."""
    node = value.grad_fn
    while node is not None and node.name() in _RESHAPED:
        node = node.next_functions[0][0]
    return bool(getattr(node, "activation", False))


class _Half(torch.autograd.Function):
    """Identity that halves the message.

    Both factors of a product find the whole relevance in their own gradient; equation 11 gives each of them one half.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *messages: Any) -> Any:
        return messages[0] * 0.5


class _Split(torch.autograd.Function):
    """x + y of equal shapes, with the normalisation of equation 11, an example at a time.

    Equation 11 multiplies branch X by |sum R^X| / (|sum R^X| + |sum R^Y|) * sum R / sum R^X, which is written here as
    sign(sum R^X) sum R / (|sum R^X| + |sum R^Y|): the same, and finite for a branch without relevance (LoRA's at B = 0).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = rows if x.dim() > 0 and x.shape[0] % rows == 0 else 1
        ctx.save_for_backward(x, y)
        return x + y

    @staticmethod
    def backward(ctx: Any, *messages: Any) -> Any:
        x, y = ctx.saved_tensors
        s = messages[0].reshape(ctx.rows, -1)
        left = torch.linalg.vecdot(s, x.reshape(ctx.rows, -1)).unsqueeze(1)
        right = torch.linalg.vecdot(s, y.reshape(ctx.rows, -1)).unsqueeze(1)
        share = (left + right) / (left.abs() + right.abs()).clamp(min=torch.finfo(s.dtype).tiny)
        return (s * (share * left.sign())).view_as(x), (s * (share * right.sign())).view_as(y), None


class _AlphaBeta(torch.autograd.Function):
    """A linear layer under the alpha-beta rule (equation 4), with the messages of its own parameters (equation 13).

    z_ji = x_j w_ji is positive where the signs agree: Z+ = x+ w+ + x- w- + b+, Z- = x+ w- + x- w+ + b-. An output that has
    contributions of one sign only gives it the whole weight. ``weight`` is [m, n]; x is [..., n].
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, alpha: float
    ) -> torch.Tensor:
        ctx.alpha = alpha
        out = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, out)
        return out

    @staticmethod
    def backward(ctx: Any, *messages: Any) -> Any:
        x, weight, bias, out = ctx.saved_tensors
        alpha = ctx.alpha
        up, down = x.clamp(min=0), x.clamp(max=0)
        grow, shrink = weight.clamp(min=0), weight.clamp(max=0)
        positive = F.linear(up, grow, None if bias is None else bias.clamp(min=0)) + F.linear(down, shrink)
        negative = F.linear(up, shrink, None if bias is None else bias.clamp(max=0)) + F.linear(down, grow)
        some, less = positive > 0, negative < 0
        relevance = messages[0] * out
        plus = torch.where(some, torch.where(less, alpha * relevance, relevance) / positive, 0.0)
        minus = torch.where(less, torch.where(some, (1 - alpha) * relevance, relevance) / negative, 0.0)
        rising = F.linear(plus, grow.t()) + F.linear(minus, shrink.t())
        falling = F.linear(plus, shrink.t()) + F.linear(minus, grow.t())
        to_weight = to_bias = None
        if ctx.needs_input_grad[1]:
            up, down, plus, minus = (t.reshape(-1, t.shape[-1]) for t in (up, down, plus, minus))
            growing, shrinking = plus.t() @ up + minus.t() @ down, plus.t() @ down + minus.t() @ up
            to_weight = torch.where(weight > 0, growing, shrinking)
        if bias is not None and ctx.needs_input_grad[2]:
            to_bias = torch.where(bias > 0, plus, minus).reshape(-1, bias.numel()).sum(0)
        return torch.where(x < 0, falling, rising), to_weight, to_bias, None


class RelevanceMode(TorchFunctionMode):
    """Active while a model's forward runs: the rules above in the place of torch's own derivatives.

    Every activation must require a gradient, which tells two activations from an activation and a constant. Trained parameters
    do, and are no activations.
    """

    def __init__(self, settings: Propagation, parameters: Iterable[torch.Tensor], rows: int):
        super().__init__()
        self.settings, self.rows = settings, rows
        self._trained = set(map(id, parameters))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _HANDLERS.get(func) if torch.is_grad_enabled() else None
        result = NotImplemented if rule is None else rule(self, func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        inside = None if rule else opened(func)
        if inside is None:
            return func(*args, **kwargs)
        with self:
            return inside(*args, **kwargs)

    def flows(self, value: Any) -> bool:
        """Whether a value is an activation: relevance flows through it, and it is no parameter."""
        return (
            isinstance(value, torch.Tensor)
            and value.requires_grad
            and value.is_floating_point()
            and id(value) not in self._trained
        )


def _linear(mode: RelevanceMode, func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    if not mode.flows(input):
        return NotImplemented
    settings = mode.settings
    alpha = 1.0 if settings.positive_after_activation and _of_activation(input) else settings.alpha
    return _AlphaBeta.apply(input, weight, bias, alpha)


def _addmm(mode: RelevanceMode, func: Any, input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta != 1 or alpha != 1 or mode.flows(mat2) or mode.flows(input):
        return NotImplemented
    return _linear(mode, func, mat1, mat2.t(), input)


def _add(mode: RelevanceMode, func: Any, input: Any, other: Any, **options: Any) -> Any:
    if options or not (mode.flows(input) and mode.flows(other)):
        return NotImplemented
    left, right = torch.broadcast_tensors(input, other)
    return _Split.apply(left, right, mode.rows)


def _times(mode: RelevanceMode, func: Any, input: Any, other: Any, **options: Any) -> Any:
    if not (mode.flows(input) and mode.flows(other)):
        return NotImplemented
    return func(_Half.apply(input), _Half.apply(other), **options)


def _elementwise(mode: RelevanceMode, func: Any, input: Any, *args: Any, **options: Any) -> Any:
    if not mode.flows(input):
        return NotImplemented
    with torch.no_grad():
        y = func(input, *args, **options)
    if func in _SOFTMAX:
        # softmax(0) is not 0, so that here the stabiliser matters.
        return _Elementwise.apply(input, y, max(mode.settings.epsilon, _TINY), False)
    return _Elementwise.apply(input, y)


def _attention(
    mode: RelevanceMode,
    func: Any,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by its definition: two products of activations with a softmax between them."""
    if not (mode.flows(query) and mode.flows(key) and mode.flows(value)):
        return NotImplemented
    if dropout_p:
        raise ValueError("relevance is propagated without dropout: put the model into eval mode")
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    least = torch.finfo(query.dtype).min
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2]).tril().bool()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, least)
    with mode:
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        # A row whose keys are all masked would be NaN at minus infinity.
        return F.softmax(scores if attn_mask is None else scores + attn_mask.clamp(min=least), -1) @ value


def _layer_norm(
    mode: RelevanceMode,
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    if not mode.flows(input):
        return NotImplemented
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    held = torch.rsqrt(centred.detach().square().mean(dims, keepdim=True) + eps)
    return _affine(centred * held, weight, bias)


def _rms_norm(
    mode: RelevanceMode, func: Any, input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    if not mode.flows(input):
        return NotImplemented
    dims = tuple(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    held = torch.rsqrt(input.detach().square().mean(dims, keepdim=True) + eps)
    return _affine(input * held, weight, None)


def _affine(normed: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _inverse_root(mode: RelevanceMode, func: Any, input: Any, *args: Any, **options: Any) -> Any:
    """The inverse root of an RMS norm written out: a constant to relevance."""
    if not mode.flows(input):
        return NotImplemented
    with torch.no_grad():
        return func(input, *args, **options)


def _embedding(mode: RelevanceMode, func: Any, *args: Any, **options: Any) -> Any:
    return track_relevance(func(*args, **options))


_SOFTMAX = (F.softmax, torch.softmax, torch.Tensor.softmax)
_HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.embedding: _embedding,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys(
        (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__), _add
    ),
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), _times),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm), _times),
    **dict.fromkeys(
        (F.gelu, F.silu, F.relu, F.tanh, torch.tanh, torch.Tensor.tanh, torch.relu, *_SOFTMAX), _elementwise
    ),
    **dict.fromkeys((torch.rsqrt, torch.Tensor.rsqrt), _inverse_root),
}

_ACTIVATIONS = tuple({kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})


@contextmanager
def activations_as_functions(model: torch.nn.Module) -> Iterator[None]:
    """While open, activation modules are one element-wise function each, however many operations they are written in.

    GPT-2's GELU multiplies x by a function of x; taken apart, that is a product of two activations.
    """

    def forward(original: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return original(x)
        with torch.no_grad():
            y = original(x)
        return _Elementwise.apply(x, y)

    patched = [m for m in model.modules() if isinstance(m, _ACTIVATIONS) and "forward" not in vars(m)]
    for module in patched:
        module.forward = functools.partial(forward, module.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in patched:
            del module.forward
