"""Per-example losses inside a model's own forward: one loss a unit, as the model would compute it on that unit alone.

The losses that stock models return average over the tokens of a whole batch, so that one example's loss depends on how
long the others are. During training forwards only, torch's loss functions average over each unit's own tokens instead;
evaluation keeps the usual figure.

Class weights would cancel in such a mean wherever an example has one label (torch divides by the sum of the weights): a
unit's weighted loss is therefore divided by the number of its labelled tokens, so that the weights stay.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.calls.autograd import graph_of, summands
from fastdp.calls.batches import tensors
from fastdp.calls.named import is_metadata
from fastdp.calls.values import RowValues
from fastdp.engine.errors import OwnLoss, SelfCheckError, UnsupportedUse
from fastdp.engine.uses.layout import Layout
from fastdp.engine.uses.logits import Logits, takes
from fastdp.engine.uses.selections import SelectionMode

_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_ELEMENTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss gaussian_nll_loss soft_margin_loss cosine_embedding_loss margin_ranking_loss hinge_embedding_loss "
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss "
    "triplet_margin_with_distance_loss"
).split()
#: Torch's own functions.
LOSSES = frozenset(getattr(F, name) for name in (*_CLASS_LOSSES, *_ELEMENTWISE_LOSSES))
#: The names of their parameters, in order.
_PARAMETERS = {
    name: tuple(inspect.signature(getattr(F, name)).parameters)
    for name in (*_CLASS_LOSSES, *_ELEMENTWISE_LOSSES, "ctc_loss")
}


@dataclass(frozen=True)
class Term:
    """One loss function's call: the scalar that the model goes on computing with, and each unit's loss ``[units]``.

    Or a tensor with rows that the model sums itself, without ``mean``.

    Args:
        leaf: what that scalar's graph begins with. A model may add to the scalar in place, which torch forbids of a leaf.
        mean: the `masked_mean` of the units' losses.
    """

    leaf: torch.Tensor
    scalar: torch.Tensor
    per_unit: torch.Tensor
    mean: torch.Tensor | None = None

    def weighted(self, share: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Each unit's loss ``[units]``, times the term's coefficients."""
        if self.mean is not None:
            return self.per_unit * share
        return layout.sum_lanes((self.per_unit * share).reshape(layout.rows, -1).float().sum(1))


def shares(total: torch.Tensor, terms: Sequence[Term]) -> list[torch.Tensor]:
    """The coefficients that a model's loss gives to its terms, by which the loss is their weighted sum; 0 for one without."""
    leaves = [term.leaf for term in terms]
    return list(torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True))


class LossTerms:
    """The losses intercepted in one forward pass.

    Args:
        layout: cuts token losses into units.
        alone: the pass sees one row by itself, so the scalar stays joined to the model's graph.
        reductions: the model's own sums over rows are losses too.
        selections: calls in the model's code that select by the data's values what a parameter or a loss sees, as traced, with
            the module that makes each.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        alone: bool = False,
        reductions: bool = False,
        selections: Set[tuple[Any, str]] = frozenset(),
    ):
        self.layout = layout
        known = selections and not alone and layout.token_segments is None
        compares = layout.weights.device.type == "cpu"
        calls = {call for call, _ in selections}
        self.selected = SelectionMode(layout.rows, calls, compares=compares) if known else None
        #: Follows what is selected through the whole model, where a loss sees it.
        mode = self.selected if any(not module for _, module in selections) else None
        self.throughout: AbstractContextManager[Any] = mode or nullcontext()
        self.alone = alone
        self.reductions = reductions
        self.terms: list[Term] = []
        #: Tensors with rows of which the model made something without: by their places in autograd's graph.
        self.reduced: dict[tuple[Any, int], torch.Tensor] = {}
        self.unmapped: str | None = None
        #: Tokens a row that each loss saw.
        self.tokens: list[int] = []

    def add(
        self, losses: torch.Tensor, valid: torch.Tensor | None, reduction: str, *given: torch.Tensor
    ) -> torch.Tensor | None:
        """Take token losses ``[N]`` of what was given, and which of them count; None if the axis cannot be cut into units."""
        whose = None if self.selected is None else self.selected.whose(*given)
        if whose is None and not self.maps(losses.numel()):
            return None
        by_unit = self.reduce(losses, valid, reduction, whose)
        # How many tokens the data select follows from no shape.
        return self.note(by_unit, losses.numel() if whose is None else 0, reduction)

    def of(self, total: torch.Tensor) -> list[Term]:
        """What a model's loss is the weighted sum of: loss functions' terms, and its own last tensors with rows.

        Raises `OwnLoss` if it has none.
        """
        found = summands(total, self.reduced, [term.leaf for term in self.terms]) if self.reduced else []
        self.tokens += [t.numel() // self.layout.rows for t in found]
        terms = self.terms + [Term(t, t, t) for t in found]
        if not terms:
            raise OwnLoss(self.unmapped or "the model computes its loss without torch's loss functions")
        return terms

    def maps(self, tokens: int) -> bool:
        """Whether the axis of a loss's tokens can be cut into units."""
        segments = self.layout.token_segments
        if self.layout.covers(tokens) or (segments is not None and tokens == segments[:, 1:].numel()):
            return True
        self.unmapped = f"a loss over {tokens} tokens cannot be divided among {self.layout.rows} rows"
        return False

    def reduce(
        self, losses: torch.Tensor, valid: torch.Tensor | None, reduction: str, whose: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each unit's loss ``[units]``: the mean or the sum of its tokens', of the rows ``whose`` they are if not in order."""
        losses = losses.reshape(-1).float()
        if whose is None and len(losses) == self.layout.rows and self.layout.token_segments is None:
            # A row's only loss is its mean: torch's is 0 of a label that is ignored.
            return self.layout.sum_lanes(losses)
        valid = torch.ones_like(losses) if valid is None else valid.reshape(-1).to(losses.dtype)
        if whose is not None:
            units = self.layout.lane_units[whose.repeat_interleave(len(losses) // max(len(whose), 1))]
            sums, counts = (t.new_zeros(self.layout.units).index_add(0, units, t) for t in (losses, valid))
            return sums if reduction == "sum" else sums / counts.clamp(min=1)
        return self._sums(losses) if reduction == "sum" else self._means(losses, valid)

    def note(self, per_unit: torch.Tensor, tokens: int, reduction: str) -> torch.Tensor:
        """Take the units' losses ``[units]`` of a loss function over so many tokens."""
        if tokens:
            self.tokens.append(tokens // self.layout.rows)
        if self.alone:
            return per_unit.sum()
        values = per_unit.detach()
        mean = masked_mean(values, self.layout.weights)
        leaf = (values.sum() if reduction == "sum" else mean.detach()).requires_grad_()
        self.terms.append(Term(leaf, leaf.clone(), per_unit, mean))
        return self.terms[-1].scalar

    def _means(self, losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        if layout.token_segments is None:
            rows = losses.view(layout.rows, -1)
            counts = valid.view(layout.rows, -1)
            return layout.sum_lanes(rows.sum(1) / counts.sum(1).clamp(min=torch.finfo(counts.dtype).tiny))
        return self._sums(losses) / self._sums(valid).clamp(min=torch.finfo(valid.dtype).tiny)

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        layout, segments = self.layout, self.layout.token_segments
        if segments is None:
            return layout.sum_lanes(values.view(layout.rows, -1).sum(1))
        if values.numel() != segments.numel():
            segments = segments[:, :-1]
        return values.new_zeros(layout.units).index_add(0, segments.reshape(-1), values)

    def label_mask(self, tokens: int) -> torch.Tensor | None:
        """For packed rows, which tokens may carry a next-token label: not the last of a unit, whose label is another's."""
        segments = self.layout.token_segments
        if segments is None:
            return None
        same = segments[:, 1:] == segments[:, :-1]
        if tokens == segments.numel():
            same = F.pad(same, (0, 1))
        return same.reshape(-1)


def masked_mean(per_unit: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean over the units of weight 1 with a finite value; 0 if there are none."""
    if per_unit.device.type == "cpu":
        found = [loss for loss, weight in zip(per_unit.tolist(), weights.tolist()) if weight and math.isfinite(loss)]
        return torch.tensor(sum(found) / max(len(found), 1), dtype=per_unit.dtype)
    # Torch's own isfinite takes four launches.
    counted = (weights > 0) & (per_unit - per_unit == 0)
    return torch.where(counted, per_unit, 0).sum() / counted.sum().clamp_(min=1)


@contextmanager
def intercepted(terms: LossTerms) -> Iterator[None]:
    """While open, torch's loss functions with a reducing ``reduction`` report to ``terms``."""
    functions = vars(F)
    originals = {name: functions[name] for name in _PARAMETERS}
    try:
        functions.update({name: partial(_report, name, original, terms) for name, original in originals.items()})
        own = terms.reductions and terms.layout.token_segments is None
        with terms.throughout, _RowReductions(terms) if own else nullcontext():
            yield
    finally:
        functions.update(originals)


#: torch's class losses, by the name of what they call. A loop that calls F.cross_entropy(model(x), y) has taken that function
#: before the model runs, but not what it calls. Two runs may watch at once and end in any order, so each puts these back.
_INNER: Any = torch._C._nn
_WATCHED_LOSSES = {
    name: (public, getattr(_INNER, name))
    for name, public in (("cross_entropy_loss", "cross_entropy"), ("nll_loss_nd", "nll_loss"))
}


@contextmanager
def batch_divisors() -> Iterator[list[str]]:
    """What torch's class losses divide by meanwhile, in words, where that is the whole batch's."""
    found: list[str] = []

    def watched(name: str, input: Any, target: Any, weight: Any, reduction: int, ignore: int, *rest: Any) -> Any:
        public, original = _WATCHED_LOSSES[name]
        # A loss without gradient, as of a teacher, trains nothing.
        counts = reduction == 1 and input.requires_grad
        if counts and weight is not None:
            found.append(f"{public} with weight= and reduction='mean' divides by the weights of the whole batch")
        elif counts and bool((target == ignore).any()):
            found.append(f"{public} with reduction='mean' divides by the labels of the whole batch")
        return original(input, target, weight, reduction, ignore, *rest)

    try:
        for name in _WATCHED_LOSSES:
            setattr(_INNER, name, partial(watched, name))
        yield found
    finally:
        for name, (_, original) in _WATCHED_LOSSES.items():
            setattr(_INNER, name, original)


class _RowReductions(TorchFunctionMode):
    """Notes in ``terms`` the tensors with rows of which a model makes others, for losses that it computes by itself."""

    def __init__(self, terms: LossTerms):
        super().__init__()
        self._terms = terms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, getattr(func, "__name__", "")
        if is_metadata(func) or not torch.is_grad_enabled():
            return func(*args, **given)
        if name in ("dot", "inner", "matmul", "__matmul__", "vdot") and {t.dim() for t in args} == {1}:
            # Weights may follow from the inputs, so that no graph tells them from the losses.
            func, args = torch.sum, (args[0] * args[1],)
        rows = self._terms.layout.rows
        whole = [t for t in tensors((args, given)) if type(t) is torch.Tensor and t.grad_fn is not None and t.dim()]
        owned = [t for t in whole if t.shape[0] == rows]
        if owned and name in ("nanmean", "nansum") and len(args) == 1 and not given:
            # A sum of products with 0 would be NaN.
            valid = ~args[0].isnan()
            scalar = self._terms.add(torch.where(valid, args[0], 0.0), valid, name[3:], args[0])
            if scalar is not None:
                return scalar
        result = func(*args, **given)
        self._terms.reduced |= {(t.grad_fn, t.output_nr): t for t in owned if t.shape != getattr(result, "shape", None)}
        return result


def _report(name: str, original: Callable[..., Any], terms: LossTerms, /, *args: Any, **options: Any) -> Any:
    """The scalar that a loss function reduces to, whose losses by unit go to ``terms``; torch's own if they cannot."""
    given = dict(zip(_PARAMETERS[name], args)) | options
    operands = [t for t in given.values() if isinstance(t, torch.Tensor)]
    reduction, older = given.pop("reduction", "mean"), [given.pop(key, None) for key in ("size_average", "reduce")]
    if older != [None, None]:
        # Torch prefers its older arguments where they are given.
        reduction = "none" if older[1] is False else "sum" if older[0] is False else "mean"
    if reduction == "none" or not torch.is_grad_enabled() or not any(t.requires_grad for t in operands):
        return original(*args, **options)
    if name in _CLASS_LOSSES:
        scalar = _class_loss(original, terms, given, reduction)
    else:
        losses = original(**given, reduction="none")
        if name == "ctc_loss" and reduction == "mean":
            # As torch does, each row's by the length of its own target.
            losses = losses / torch.as_tensor(given["target_lengths"], device=losses.device).clamp(min=1)
        elif reduction == "batchmean":
            # The mean over rows of each row's sum.
            losses = losses.flatten(1).sum(1)
        scalar = terms.add(losses, None, "sum" if reduction == "sum" else "mean", *operands)
    return original(*args, **options) if scalar is None else scalar


def _class_loss(
    original: Callable[..., Any], terms: LossTerms, given: dict[str, Any], reduction: str
) -> torch.Tensor | None:
    input, target, ignored = given["input"], given["target"], given.get("ignore_index", -100)
    if isinstance(input, Logits) and (input.small or not takes(given)):
        input = input.dense()
    valid = None
    if not target.is_floating_point():
        within = terms.label_mask(target.numel())
        if within is not None:
            target = target.masked_fill(~within.view(target.shape), ignored)
        valid = target != ignored
    if isinstance(input, Logits) and (take := input.source.take) is not None:
        if terms.maps(target.numel()):
            by_unit = take(input, target, ignored, lambda t: terms.reduce(t, valid, reduction))
            return terms.note(by_unit, target.numel(), reduction)
        input = input.dense()
    losses = original(**{**given, "input": input, "target": target}, reduction="none")
    return terms.add(losses, valid, reduction, input, target)


def divided_terms(found: RowValues, singles: Mapping[int, RowValues], rows: int) -> frozenset[int]:
    """The losses whose coefficient is ``rows`` times as large for rows alone (``singles``), all others' being the same.

    Raises `UnsupportedUse` if a coefficient depends on the batch in another way.
    """
    divided, (single, *_) = set(), singles.values()
    for index, (several, one) in enumerate(zip(found.shares, single.shares)):
        if several is None:
            # The row that has most of the model's own sum tells.
            alone = {at: own.values[index] for at, own in singles.items() if len(own.values) > index}
            pairs = [(float(value[0]), float(found.values[index][at])) for at, value in alone.items()]
            one, several = max(pairs, key=lambda pair: abs(pair[0]))
            divided |= {index} if abs(several * rows - one) <= abs(several - one) else set()
        elif one is None or abs(several - one) > 1e-5 * abs(several):
            if one is None or abs(several * rows - one) > 1e-5 * abs(one):
                raise UnsupportedUse("the coefficients of the model's loss depend on the batch")
            divided.add(index)
    return frozenset(divided)


def combine(total: torch.Tensor, found: LossTerms, divided: frozenset[int], *, verify: bool) -> torch.Tensor:
    """The per-unit losses ``[units]`` of a model's scalar loss: its terms with the coefficients it gives them.

    The terms ``divided`` are those whose sum the model divides by the number of rows; each unit's has been divided by 1.

    With ``verify``, raises `UnsupportedUse` if the loss is not a weighted sum of the terms: what is added to them may
    depend on the parameters alone (a penalty of the weights), or on the whole batch. Without it nothing is read back from
    a GPU.
    """
    terms = found.of(total)
    # A version counts what was added to a scalar in place.
    if len(terms) == 1 and not divided and total is terms[0].scalar and total._version == 0:
        return terms[0].per_unit
    if len(terms) == len(found.terms) and _reaches_more(total, terms):
        raise OwnLoss("the model adds a term of its own to torch's loss functions")
    own = shares(total, terms)
    # On a processor nothing waits: a loss that is cut off, or bent, beyond what the first batches held is found when it comes.
    if verify or total.device.type == "cpu":
        _require_weighted_sum(total, own, terms, first=verify)
    layout = found.layout
    parts = [t.weighted(s * layout.rows if i in divided else s, layout) for i, (t, s) in enumerate(zip(terms, own))]
    return torch.stack(parts).sum(0)


#: Operations of a loss that differ from a weighted sum without a trace in its value.
_CHOOSING = ("Max", "Min", "Amax", "Amin", "Where", "Topk", "Sort", "Kthvalue", "Median")


def _reaches_more(total: torch.Tensor, terms: Sequence[Term]) -> bool:
    """Whether a model's loss has gradients beyond its terms, whose graphs begin with leaves of their own.

    Raises `UnsupportedUse` for a loss that chooses among them, which may follow the whole batch.
    """
    leaves, nodes = {id(term.leaf) for term in terms}, list(graph_of(total))
    if any(node.name().startswith(_CHOOSING) for node in nodes):
        raise UnsupportedUse("the model chooses among its losses by what the batch has")
    own = (getattr(node, "variable", None) for node in nodes)
    return any(variable is not None and id(variable) not in leaves for variable in own)


def _require_weighted_sum(total: torch.Tensor, own: list[torch.Tensor], terms: list[Term], *, first: bool) -> None:
    if not any(bool(share.any()) for share in own):
        kind = SelfCheckError if first else UnsupportedUse
        raise kind("the model's loss does not follow the per-example losses inside it; nothing can be clipped")
    explained = sum(float((share * term.leaf.detach()).sum()) for share, term in zip(own, terms))
    value = float(total.detach())
    rounding = 1e-4 if total.dtype in (torch.float32, torch.float64) else 1e-2
    if abs(value - explained) > rounding * max(abs(value), abs(explained)):
        raise UnsupportedUse("the model adds something to its per-example loss")
