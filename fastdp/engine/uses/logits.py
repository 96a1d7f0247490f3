"""A vocabulary's logits that nobody has computed yet: what a model does to them between its head and its loss is noted instead.

``hidden @ W^T`` of a whole batch is the largest tensor of many training steps, and nobody reads it but the cross-entropy.
Inside a private forward pass a head that the trace saw to be used so returns `Logits`: casts, scales, soft caps, shifts and
changes of shape are noted, and the loss takes them a tile at a time (`fastdp.engine.rules.head`). Any other operation computes
the logits as ever.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fastdp.calls.batches import everything, map_tensors, tensors
from fastdp.calls.named import functions, is_in_place, is_metadata
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.use import ForbidBackward, as_autocast, uncast
from fastdp.ops.heads import cuts, most_tokens, on_gpu
from fastdp.ops.placed import copy_to_device
from fastdp.ops.routes import is_allowed

#: A matrix of fewer rows than this is no vocabulary: its outputs are small, and loops read them.
VOCABULARY = 4096
#: Numbers of one tile on a processor, unless one example alone has more.
TILE = 2**24
#: Numbers of the part of a tile that the loss's own gradient is computed for at once.
LOSS_CHUNK = 2**22

_READ_ERROR = "These logits were not kept, or weights changed since. Read them before step(), or pass keep_logits=True."
_TERM_ERROR = (
    "The loop's loss uses logits that were not kept. Pass keep_logits=True to make_private or PrivacyArguments."
)
_READ_WARNING = "Reading logits computes them again. Pass keep_logits=True to make_private or PrivacyArguments."

_ELEMENTWISE = functions(
    "to float double half bfloat16 mul multiply div true_divide add sub subtract tanh neg clone contiguous "
    "__mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__"
)
_CASTS = functions("to float double half bfloat16 detach clone contiguous")
_RESHAPING = functions("view reshape")
_INDEXING = functions("__getitem__ unsqueeze squeeze")

Step = Callable[[torch.Tensor], torch.Tensor]


def widen(z: torch.Tensor) -> torch.Tensor:
    """The step of most models, which `token_losses` takes in any case."""
    return z.float()


@dataclass
class Source:
    """What logits are computed from.

    Args:
        hidden: ``[..., d]``.
        weight: ``[V, d]``, and ``bias`` ``[V]``.
        product: computes the logits as ever.
        take: in an engine's pass, gives the units' losses of a cross-entropy: see `fastdp.engine.rules.head.take`.
        small: the logits are less than a tile, or tiles would take longer, and they are computed as ever.
        cast_only: as they are where anything but casts is done to them.
        strict: raise `UnsupportedUse` where any of these was written since.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    product: Callable[[], torch.Tensor]
    take: Callable[..., torch.Tensor] | None = None
    small: bool = False
    cast_only: bool = False
    strict: bool = True
    #: How often a cross-entropy took these logits, and whether anything else computed them.
    taken: int = 0
    logits: torch.Tensor | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.versions = self.written()
        self.dtype = as_autocast(self.hidden[:0]).dtype if self.hidden.dim() else self.hidden.dtype

    def written(self) -> tuple[int, ...]:
        return tuple(t._version for t in (self.hidden, self.weight, self.bias) if t is not None)

    def require_unwritten(self) -> None:
        """Raise `UnsupportedUse` unless everything still is as it was when the logits were left out."""
        if self.strict and self.versions != self.written():
            raise UnsupportedUse("the model writes into what its logits are computed from")

    def compute(self) -> torch.Tensor:
        """The logits, as ever: once."""
        if self.logits is None:
            self.require_unwritten()
            if self.taken and self.take is not None:
                raise UnsupportedUse("the model reads its logits after their loss was taken")
            self.logits = self.product()
        return self.logits

    def close(self, *, lost: bool = False) -> None:
        """The forward pass is over: who reads what was not computed has it computed again, without a graph, or ``lost``."""
        self.closed, self.take, self.logits, self.hidden = True, None, None, self.hidden.detach()
        self.versions = () if lost else self.versions
        self.__dict__.pop("product", None)

    def again(self, steps: tuple[Step, ...]) -> torch.Tensor:
        """The logits after the pass, of which no loss may be made."""
        if self.versions != self.written():
            raise RuntimeError(_READ_ERROR)
        warnings.warn(_READ_WARNING, stacklevel=4)
        with uncast(self.weight.device):
            z = F.linear(*[t.detach().to(self.dtype) for t in (self.hidden, self.weight, self.bias) if t is not None])
            return ForbidBackward.apply(reduce(lambda z, step: step(z), steps, z).requires_grad_(), _TERM_ERROR)


class Logits(torch.Tensor):
    """A tensor ``[..., V]`` that looks like logits and has not been computed.

    ``token_index`` ``[...]`` says which token of the flattened hidden states each of its rows comes from; ``steps`` are the
    element-wise operations since, ``history`` all of them.
    """

    source: Source
    token_index: torch.Tensor
    steps: tuple[Step, ...]
    history: tuple[Step, ...]
    #: After the pass: what a loop has read, and how a cast of logits reads them.
    kept: torch.Tensor | None = None
    cast: Callable[[], torch.Tensor] | None = None

    @staticmethod
    def __new__(
        cls,
        source: Source,
        dtype: torch.dtype,
        index: torch.Tensor,
        steps: tuple[Step, ...] = (),
        history: tuple[Step, ...] = (),
    ) -> Logits:
        shape = (*index.shape, source.weight.shape[0])
        grows = source.weight.requires_grad or (source.bias is not None and source.bias.requires_grad)
        grad = torch.is_grad_enabled() and (source.take is not None or source.hidden.requires_grad or grows)
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=source.weight.device, requires_grad=grad
        )
        self.source, self.token_index, self.steps, self.history = source, index.contiguous(), steps, history
        return self

    @classmethod
    def of(cls, source: Source) -> Logits:
        """What a head returns."""
        index = torch.arange(source.hidden.shape[:-1].numel()).view(source.hidden.shape[:-1])
        return cls(source, source.dtype, index)

    @property
    def small(self) -> bool:
        """Whether a loss computes them as ever."""
        return self.source.small or (self.source.cast_only and not {widen}.issuperset(self.steps))

    def dense(self) -> torch.Tensor:
        """The tensor itself; after the pass, what the loop has read or written of it."""
        if not self.source.closed:
            return reduce(lambda z, step: step(z), self.history, self.source.compute())
        if self.kept is None:
            # A loss term is refused although a loop read this without gradients before.
            with torch.inference_mode(False), torch.enable_grad():
                self.kept = self.cast() if self.cast else self.source.again(self.history)
        return self.kept

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Logits({list(self.shape)}, not computed)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = next(t for t in tensors((args, kwargs)) if isinstance(t, Logits))
        if not own.source.closed:
            found = _loss(func, args, kwargs) if func is F.cross_entropy else _defer(func, own, args, kwargs)
            if found is not None:
                return found
            if is_in_place(func) and own.source.strict:
                raise UnsupportedUse("the model writes into its logits")
        elif func in _CASTS and args and args[0] is own:
            # What passes an output on (a cast of all outputs, say) reads nothing.
            tried = func(torch.empty(0, dtype=own.dtype, device=own.device), *args[1:], **kwargs)
            if tried.is_floating_point() and tried.device == own.device:
                found = Logits(own.source, tried.dtype, own.token_index)
                found.cast = lambda: func(own.dense(), *args[1:], **kwargs)
                return found
        args, kwargs = map_tensors((args, kwargs), lambda t: t.dense() if isinstance(t, Logits) else t)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = next(t for t in tensors((args, kwargs)) if isinstance(t, Logits))
        if func is torch.ops.aten.detach.default:
            return own if own.source.closed else Logits(own.source, own.dtype, own.token_index, own.steps, own.history)
        raise RuntimeError(_READ_ERROR if own.source.closed else f"{func} of logits below torch's function layer")


def _defer(func: Any, own: Logits, args: Any, kwargs: Any) -> Logits | None:
    """The operation noted, where it acts on every number alone or moves tokens; None for any other."""
    width = own.shape[-1]
    every = list(tensors((args, kwargs)))
    given = [t for t in every if t is not own]
    if len(every) != len(given) + 1:
        return None
    if func in _ELEMENTWISE:
        if not all(_constant(t, width) for t in given):
            return None
        versions = [t._version for t in given]

        def step(z: torch.Tensor) -> torch.Tensor:
            if own.source.strict and versions != [t._version for t in given]:
                raise UnsupportedUse("the model writes into what its logits are scaled with")

            def tile_operand(t: torch.Tensor) -> torch.Tensor:
                return z if t is own else t.reshape(-1 if t.numel() == width else ())

            tile_args, tile_kwargs = map_tensors((args, kwargs), tile_operand)
            out: torch.Tensor = func(*tile_args, **tile_kwargs)
            return out

        tried = step(torch.empty((0, width), dtype=own.dtype, device=own.device))
        if tried.shape != (0, width) or tried.device != own.device or not tried.is_floating_point():
            return None
        steps = own.steps
        if func not in _CASTS or tried.dtype != own.dtype:
            steps += (widen if func in _CASTS and tried.dtype == torch.float32 != own.dtype else step,)
        return Logits(own.source, tried.dtype, own.token_index, steps, (*own.history, step))
    if func not in _RESHAPING and func not in _INDEXING and func is not torch.Tensor.flatten:
        return None
    rest = args[1:]
    if not rest or args[0] is not own or kwargs or not all(_is_place(v) for _, v in everything(rest)):
        return None
    marked = own.token_index.unsqueeze(-1).expand(own.shape)
    try:
        # Rows whose numbers would be taken apart have no such view, and a view costs nothing.
        moved = marked.view(*rest) if func in _RESHAPING else func(marked, *rest)
    except (RuntimeError, IndexError, TypeError):
        return None
    if moved.dim() < 1 or moved.shape[-1] != width or moved.stride(-1) != 0:
        return None
    index = moved[..., 0]
    return Logits(own.source, own.dtype, index, own.steps, (*own.history, lambda z: func(z, *rest)))


def _constant(value: torch.Tensor, width: int) -> bool:
    """Whether a tensor is one number, or one for each entry of the vocabulary, and no gradient is asked of it."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.requires_grad:
        return False
    return value.numel() == 1 or (value.numel() == width and value.shape[-1] == width)


def _is_place(value: Any) -> bool:
    if isinstance(value, slice):
        return all(v is None or isinstance(v, int) for v in (value.start, value.stop, value.step))
    return value is None or value is Ellipsis or (isinstance(value, int) and not isinstance(value, bool))


def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    """A cross-entropy of logits that no engine's pass takes: by parts of the tokens, each computed again for gradients."""
    given = inspect.signature(_cross_entropy).bind(*args, **kwargs).arguments
    own, target = given["input"], given["target"]
    if not isinstance(own, Logits) or own.source.take is not None or not takes(given):
        return None
    ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
    own.source.taken += 1
    hidden, weight, bias = inputs(own)
    steps, spans = own.steps, cuts(hidden.shape[0], weight, LOSS_CHUNK)

    def part(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return token_losses(F.linear(hidden, weight, bias), target, ignored, steps)

    with quiet(hidden):
        again = partial(checkpoint, part, use_reentrant=False, preserve_rng_state=False)
        losses = torch.cat([again(hidden[a:b], target[a:b]) for a, b in spans])
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignored).sum()


def takes(given: Mapping[str, Any]) -> bool:
    """Whether a cross-entropy's arguments are tokens' logits and labels, without class weights and smoothing."""
    plain = all(given.get(name) is None for name in ("weight", "size_average", "reduce"))
    logits, target = given["input"], given["target"]
    one_label = logits.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    return plain and one_label and not given.get("label_smoothing")


def inputs(own: Logits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The hidden states of the rows of logits ``[N, d]``, weight and bias, cast as autocast would."""
    source = own.source
    source.require_unwritten()
    hidden = as_autocast(source.hidden.reshape(-1, source.hidden.shape[-1]))
    if own.token_index.numel() != hidden.shape[0]:
        hidden = hidden.index_select(0, copy_to_device(own.token_index.reshape(-1), hidden.device))
    return hidden, as_autocast(source.weight), as_autocast(source.bias)


@contextmanager
def quiet(x: torch.Tensor) -> Iterator[None]:
    """No autocast, and no mode that looks at torch's functions: what happens inside is one operation to everybody."""
    with torch._C.DisableTorchFunction(), uncast(x.device):
        yield


def token_losses(z: torch.Tensor, target: torch.Tensor, ignored: int, steps: tuple[Step, ...]) -> torch.Tensor:
    """Cross-entropies ``[N]`` of products with the head's weight ``[N, V]``, float32 or more."""
    for step in steps:
        z = step(z)
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    return _cross_entropy(z, target, ignore_index=ignored, reduction="none")


#: Torch's own, whatever stands in its place meanwhile.
_cross_entropy = F.cross_entropy


def _pays(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether tiles take no longer than logits: each is made once where the weight is frozen or units' gradients are kept.

    On a GPU a kernel moves fewer bytes than torch, which makes up for one more product, where it knows the loss's operations.
    """
    if on_gpu(weight):
        return True
    length, dtype = hidden.shape[:-1][-1] if hidden.dim() > 1 else 1, as_autocast(hidden[:0]).dtype
    rows, width = weight.shape
    return not weight.requires_grad or is_allowed("instantiate", rows, width, length, 2, dtype=dtype)


@dataclass
class Heads:
    """The matrices that a trace saw used as heads: by the weight's identity, and whether passes now leave logits out."""

    weights: dict[int, torch.nn.Parameter] = field(default_factory=dict)
    #: Logits of the forward pass that runs.
    made: list[Source] = field(default_factory=list)
    #: Whether a pass without an engine's context leaves them out too.
    plainly: bool = False
    #: Whether logits are left out where that takes longer, too.
    always: bool = False
    #: Logits of so many numbers are computed as ever.
    tile: ClassVar[int] = TILE

    def leave_out(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Callable[[], torch.Tensor],
        take: Callable[..., torch.Tensor] | None = None,
    ) -> Logits:
        """The logits of one call of a head, left out."""
        few = hidden.shape[:-1].numel() <= most_tokens(weight, self.tile)
        small = few or not (self.always or _pays(hidden, weight))
        source = Source(hidden, weight, bias, product, take, small, on_gpu(weight) and not self.always)
        if take is not None:
            self.made.append(source)
        return Logits.of(source)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Leave logits out meanwhile, in passes of the plain model too."""
        before, self.plainly = self.plainly, bool(self.weights)
        try:
            yield
        finally:
            self.plainly = before

    def close(self) -> None:
        """A forward pass is over."""
        for source in self.made:
            source.close()
        self.made.clear()
