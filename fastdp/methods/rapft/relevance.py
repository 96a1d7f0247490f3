"""Relevance maps of trained parameters: one pass of propagation over a batch, an example at a time or summed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import fastdp.distributed.pieces as pieces
import fastdp.ops as ops
from fastdp.calls.batches import accepted, as_long_as, take_rows, tensors
from fastdp.calls.modes import in_mode
from fastdp.distributed.shards import UnshardedParameters
from fastdp.engine.capture.intercept import Reads
from fastdp.engine.capture.trace import Key, Tracer
from fastdp.engine.errors import UnsupportedUse
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout, Ticket
from fastdp.engine.uses.rows import BroadcastLayout
from fastdp.engine.uses.use import Tap
from fastdp.methods.rapft.initialisation import Initialisation, one_hot
from fastdp.methods.rapft.rules import (
    Conservation,
    Context,
    Propagation,
    RelevanceMode,
    activations_hand_on,
    begin,
    stabilised,
)

#: Most numbers that the maps of one pass hold together; a longer batch is cut.
PASS_NUMBERS = 2**26
_IGNORED = -100

Map = dict[str, torch.Tensor]


class _MapSink:
    """Adds up captured gradients times their parameters, by unit: ``[units, *shape]`` float32 for each trained one."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], layout: Layout):
        self.names = {id(p): name for name, p in parameters.items()}
        self.layout = layout
        self.sums: Map = {}

    def _add(self, parameter: torch.nn.Parameter, instance: torch.Tensor) -> None:
        name = self.names[id(parameter)]
        # While the backward pass is here, the parameter has its values; of one in pieces it has none afterwards.
        instance = parameter.detach().float() * instance.reshape(self.layout.units, *parameter.shape)
        self.sums[name] = self.sums[name] + instance if name in self.sums else instance

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        if factors.one_hot:
            self._rows(parameter, factors, layout)
            return
        offsets = factors.offsets(layout)
        left, right = factors.oriented
        self._add(parameter, ops.per_unit(left, right, offsets))

    def _rows(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        count, tokens = parameter.shape[0], factors.left.shape[0]
        units = torch.arange(layout.units, device=factors.left.device)
        owner = units.repeat_interleave(factors.offsets(layout).diff(), output_size=tokens)
        every = torch.ones(tokens, device=factors.left.device)
        keys = owner * count + factors.left
        self._add(parameter, ops.weighted_sum(keys, factors.right, every, rows=layout.units * count))

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        self._add(parameter, layout.sum_lanes(lanes.float()))

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        self._add(parameter, ops.column_sums(gradient, layout.offsets(gradient.shape[0], laned=laned)))

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        self._add(parameter, gradients)

    def signed(self, parameter: torch.nn.Parameter, growing: Any, shrinking: Any, layout: Layout, swap: bool) -> None:
        """A matrix under the alpha-beta rule: pairs of (messages, inputs) for its positive and its negative weights."""
        offsets = layout.offsets(growing[0][0].shape[0])

        def total(pairs: Any) -> torch.Tensor:
            parts = [ops.per_unit(*((r, l) if swap else (l, r)), offsets) for l, r in pairs]  # noqa: E741
            return parts[0] + parts[1]

        self._add(parameter, torch.where(parameter.detach() > 0, total(growing), total(shrinking)))


class Propagator:
    """Relevance of a model's trained parameters: their value times what the rules make of their gradient (equation 13).

    Batches are mappings as the model takes them; labels, where given, say which class or which positions are explained.

    Args:
        model: any model of transformers with ``logits``; its own forward runs, in evaluation mode.
        parameters: the trained parameters by name; each must require a gradient.
        propagation: the rules.
        initialisation: where relevance starts.
        weights: how passes get at the weights.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.nn.Parameter],
        propagation: Propagation | None = None,
        initialisation: Initialisation | None = None,
        weights: UnshardedParameters | None = None,
    ):
        self.model = model
        self.weights = weights or UnshardedParameters()
        #: As modules read them in a pass.
        self.parameters = self.weights.read(parameters)
        self._forward = self.weights.running(model)
        self.propagation = propagation or Propagation()
        self.initialisation = initialisation or Initialisation()
        self._reads: Reads | None = None
        self._meetings: Mapping[Key, BroadcastLayout] = {}

    def examples(self, batch: Mapping[str, Any]) -> Iterator[Map]:
        """The map of each example, ``[rows, *shape]`` by parameter, for a few rows at a time, in order.

        Raises ValueError for a model whose parameters are read in a way that has no rule.
        """
        rows = _rows(batch)
        size = sum(p.numel() for p in self.parameters.values())
        most = max(1, PASS_NUMBERS // size)
        for start in range(0, rows, most):
            index = torch.arange(start, min(start + most, rows))
            part = batch if index.numel() == rows else take_rows(batch, index, as_long_as(batch, rows))
            yield self._run(part, Ticket(torch.arange(index.numel()), torch.ones(index.numel()), is_last=True))

    def total(self, batch: Mapping[str, Any]) -> Map:
        """The sum of the maps of a batch's examples, by parameter. Raises as `examples` does."""
        ticket = Ticket(torch.zeros(_rows(batch), dtype=torch.int64), torch.ones(1), is_last=True)
        return {name: values[0] for name, values in self._run(batch, ticket).items()}

    def conservation(self, batch: Mapping[str, Any]) -> Conservation:
        """Where the relevance of one batch went."""
        audit, rows = Conservation(), _rows(batch)
        self._run(batch, Ticket(torch.arange(rows), torch.ones(rows), is_last=True), audit)
        return audit

    def _run(self, batch: Mapping[str, Any], ticket: Ticket, audit: Conservation | None = None) -> Map:
        device = next(iter(self.parameters.values())).device
        inputs = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
        labels = inputs.get("labels")
        if not self._takes_labels():
            inputs.pop("labels", None)
        inputs = accepted(self.model, inputs)[1]
        layout = ticket.layout(device)
        context = Context(self.propagation, ticket.rows, audit)
        with (
            self.weights.apart(),
            in_mode(self.model, training=False),
            torch.enable_grad(),
            activations_hand_on(self.model, context),
        ):
            try:
                return self._propagate(inputs, labels, layout, context)
            except UnsupportedUse as error:
                raise ValueError(f"relevance cannot be propagated through this model: {error}") from None

    def _propagate(self, inputs: dict[str, Any], labels: Any, layout: Layout, context: Context) -> Map:
        reads = self._traced(inputs, layout)
        tap, sink = Tap(layout, any_formula=False), _MapSink(self.parameters, layout)
        tap.sink = sink
        flowing = {k: begin(v.detach(), context) if v.is_floating_point() else v for k, v in inputs.items()}
        with RelevanceMode(reads, tap, context):
            output = self._forward(**flowing)
        logits = _logits_of(output)
        if logits.dim() == 2:
            relevance = one_hot(logits.detach(), labels)
        else:
            counted = self._counted(logits, labels, inputs.get("attention_mask"))
            relevance = self.initialisation.generation(logits.detach(), counted)
            logits = logits[counted]
        epsilon = max(self.propagation.epsilon, torch.finfo(logits.dtype).tiny)
        messages = relevance.to(logits.dtype) / stabilised(logits.detach(), epsilon)
        if context.audit is not None:
            context.audit.output = float((messages * logits.detach()).double().sum())
        self._backward(logits, messages)
        return {
            name: sink.sums[name]
            if name in sink.sums
            else torch.zeros(layout.units, *parameter.shape, device=parameter.device)
            for name, parameter in self.parameters.items()
        }

    def _backward(self, logits: torch.Tensor, messages: torch.Tensor) -> None:
        """Every captured read returns no gradient to autograd, so a `.grad` that appears is of a read without a rule."""
        kept = {name: p.grad for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        try:
            with self.weights.gathered():
                torch.autograd.backward(logits, messages)
            missed = [name for name, p in self.parameters.items() if p.grad is not None]
        finally:
            for name, parameter in self.parameters.items():
                parameter.grad = kept[name]
        if missed:
            raise ValueError(f"relevance cannot reach {missed[0]}: it is read where no rule is known")

    def _traced(self, inputs: dict[str, Any], layout: Layout) -> Reads:
        if self._reads is None:
            found = Tracer(self.model, self.parameters).trace(self._forward, ((), inputs), layout.rows)
            if found.conflict is not None:
                raise ValueError(f"relevance cannot be propagated through this model: {found.conflict}")
            self._reads = Reads(self.parameters)
            self._reads.learn(found.carries_rows, frozenset())
            # The rule of a norm multiplies and adds apart what the traced operation does at once.
            apart = {
                (part, frozenset({id(self.parameters[name])}), rank): BroadcastLayout(fold)
                for (operation, name, rank), fold in found.carries_rows.items()
                if operation in ("layer_norm", "rms_norm")
                for part in ("mul", "add")
            }
            self._meetings = {**apart, **found.meetings}
        layout.meetings = self._meetings
        return self._reads

    def _takes_labels(self) -> bool:
        """Whether the model must be given labels: as an encoder's decoder is, or where its forward requires them."""
        wrapped: Any = self.model
        module = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
        argument = inspect.signature(module.forward).parameters.get("labels")
        required = argument is not None and argument.default is inspect.Parameter.empty
        return required or bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def _counted(self, logits: torch.Tensor, labels: Any, mask: Any) -> torch.Tensor:
        """Which positions ``[B, T]`` are explained: those that predict a labelled token, or else a token at all."""
        # Soft prompts put positions of their own in front.
        given = labels if labels is not None else mask
        counted = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        if given is not None:
            kept = given != _IGNORED if labels is not None else given != 0
            counted[:, : -kept.shape[1]] = False
            counted[:, -kept.shape[1] :] = kept
        if self._shifts():
            counted = torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], 1)
        return counted

    def _shifts(self) -> bool:
        """Whether position t predicts token t + 1, as in every causal model."""
        config = getattr(self.model, "config", None)
        kind = getattr(self.model, "loss_type", None) or ""
        return not (getattr(config, "is_encoder_decoder", False) or "Masked" in kind or "Conditional" in kind)


def require_values(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ValueError if a trained matrix is zero throughout, so that its relevance would be 0 whatever the data.

    This looks at weights alone, which are public or were released, never at data.
    """
    for name, parameter in parameters.items():
        if parameter.dim() >= 2 and not bool(pieces.full_tensor(parameter).any()):
            raise ValueError(
                f"{name} is zero throughout and has no relevance. Set map_after to some private steps, or call "
                "methods.rapft.warm_up with public data."
            )


def first_row(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch of the first example of another."""
    return take_rows(batch, torch.arange(1), as_long_as(batch, _rows(batch)))


def _logits_of(output: Any) -> torch.Tensor:
    """The logits in what a model returned: by that name, itself, or the first tensor ``[B, ..., classes]`` of a tuple."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(output, (torch.Tensor, tuple, list)) and named is None:
        named = next((t for t in tensors(output) if t.dim() > 1 and t.is_floating_point()), None)
    if named is None:
        raise ValueError(
            "relevance starts at a model's logits, and this model returns none: let forward() return 'logits'"
        )
    return named


def _rows(batch: Mapping[str, Any]) -> int:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"relevance needs batches that are mappings of the model's arguments, not a {type(batch).__name__}"
        )
    return next(t.shape[0] for t in tensors(batch) if t.dim() > 0)
