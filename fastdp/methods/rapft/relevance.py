"""Relevance maps of trained parameters: one pass of propagation over a batch, or over each of its examples."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

import fastdp.distributed.pieces as pieces
from fastdp.calls.batches import accepted, as_long_as, take_rows, tensors
from fastdp.calls.modes import in_mode
from fastdp.distributed.shards import UnshardedParameters
from fastdp.methods.rapft.initialisation import Initialisation, one_hot
from fastdp.methods.rapft.rules import Propagation, RelevanceMode, activations_as_functions, stabilised, track_relevance

#: The label of positions that no loss counts.
_IGNORED = -100

#: Relevance of each entry of the trained parameters, by name.
Map = dict[str, torch.Tensor]


class Propagator:
    """Relevance of a model's trained parameters: their value times what the rules make of their gradient (equation 13).

    Batches are mappings as the model takes them; labels, where given, say which class or which positions are explained. The
    model's own forward runs, in evaluation mode, and must give ``logits``. Each of ``parameters`` must require a gradient.
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
        #: As modules read them in a pass: whole, where the run keeps them in pieces.
        self.parameters = self.weights.read(parameters)
        self._forward = self.weights.running(model)
        self.propagation = propagation or Propagation()
        self.initialisation = initialisation or Initialisation()

    def examples(self, batch: Mapping[str, Any]) -> Iterator[Map]:
        """The map of each example, ``[1, *shape]`` by parameter, in order. Each goes through the model alone."""
        rows = _rows(batch)
        carriers = as_long_as(batch, rows)
        for row in range(rows):
            alone = self.total(take_rows(batch, torch.tensor([row]), carriers))
            yield {name: values[None] for name, values in alone.items()}

    def total(self, batch: Mapping[str, Any]) -> Map:
        """The sum of the maps of a batch's examples, float32 by parameter."""
        rows, device = _rows(batch), next(iter(self.parameters.values())).device
        inputs = {key: value.to(device) for key, value in batch.items() if isinstance(value, torch.Tensor)}
        labels = inputs.get("labels")
        if not self._takes_labels():
            inputs.pop("labels", None)
        inputs = accepted(self.model, inputs)[1]
        flowing = {k: track_relevance(v.detach()) if v.is_floating_point() else v for k, v in inputs.items()}
        with (
            self.weights.apart(),
            in_mode(self.model, training=False),
            torch.enable_grad(),
            activations_as_functions(self.model),
        ):
            with RelevanceMode(self.propagation, self.parameters.values(), rows):
                output = self._forward(**flowing)
            logits = _logits_of(output)
            if logits.dim() == 2:
                relevance = one_hot(logits.detach(), labels)
            else:
                counted = self._counted(logits, labels, inputs.get("attention_mask"))
                relevance = self.initialisation.generation(logits.detach(), counted)
                logits = logits[counted]
            epsilon = max(self.propagation.epsilon, torch.finfo(logits.dtype).tiny)
            return self._propagated(logits, relevance.to(logits.dtype) / stabilised(logits.detach(), epsilon))

    def _propagated(self, logits: torch.Tensor, messages: torch.Tensor) -> Map:
        """Each parameter's value times what a backward pass from ``messages`` brings it, under the rules of propagation."""
        found: Map = {}

        def keep(name: str, parameter: torch.nn.Parameter, message: torch.Tensor) -> None:
            # During the backward pass the parameter has its values; of one in pieces it has none afterwards.
            found[name] = parameter.detach().float() * message

        hooks = [p.register_hook(partial(keep, name, p)) for name, p in self.parameters.items()]
        try:
            with self.weights.gathered():
                torch.autograd.grad(logits, list(self.parameters.values()), messages, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return {
            n: found[n] if n in found else torch.zeros(p.shape, device=p.device) for n, p in self.parameters.items()
        }

    def _takes_labels(self) -> bool:
        """Whether the model must be given labels: as an encoder's decoder is, or where its forward requires them."""
        wrapped: Any = self.model
        module = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped
        argument = inspect.signature(module.forward).parameters.get("labels")
        required = argument is not None and argument.default is inspect.Parameter.empty
        return required or bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))

    def _counted(self, logits: torch.Tensor, labels: Any, mask: Any) -> torch.Tensor:
        """Which positions ``[B, T]`` are explained: those that predict a labelled token or, without labels, any but padding."""
        given, ignored = (labels, _IGNORED) if labels is not None else (mask, 0)
        counted = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        if given is not None:
            kept = given != ignored
            # Soft prompts put positions of their own in front.
            counted[:, : -kept.shape[1]] = False
            counted[:, -kept.shape[1] :] = kept
        if self._shifts():
            counted = torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], 1)
        return counted

    def _shifts(self) -> bool:
        """Whether position t predicts token t + 1, as in every causal model."""
        config = getattr(self.model, "config", None)
        # Transformers' name of the model's loss, such as ForMaskedLM or ForConditionalGeneration.
        kind = getattr(self.model, "loss_type", None) or ""
        return not (getattr(config, "is_encoder_decoder", False) or "Masked" in kind or "Conditional" in kind)


def require_values(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise ValueError if a trained matrix is zero throughout, so that its relevance would be 0 whatever the data.

    This looks at weights alone, which are public or were released, never at data.
    """
    for name, parameter in parameters.items():
        if parameter.dim() >= 2 and not bool(pieces.full_tensor(parameter).any()):
            raise ValueError(
                f"{name} is zero throughout and has no relevance. Set map_after to some private steps, or train some steps "
                "on public data first."
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
            f"relevance needs batches that are mappings of the model's arguments, not a {type(batch).__name__}: let collate_fn "
            "return a dict"
        )
    return next(t.shape[0] for t in tensors(batch) if t.dim() > 0)
