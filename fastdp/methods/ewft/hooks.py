"""EW-FT's hold on a model: hooks that take what they need from its inputs, and put released codes in a layer's place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fastdp.accounting as accounting
from fastdp.accounting.statements import SEQUENCES
from fastdp.calls.batches import map_leaves, tensors
from fastdp.calls.modes import in_mode
from fastdp.calls.randomness import unchanged
from fastdp.methods.blocks import Blocks, Layer, find_blocks
from fastdp.methods.ewft.mask import argument, hide_padding
from fastdp.methods.ewft.records import TOKEN_LABELS
from fastdp.methods.perturbation import Releases
from fastdp.methods.public import PublicText
from fastdp.ops.stream import NoiseStream
from fastdp.validate import integer, one_of

_QUERIES = "no training record was among the inference queries, whose releases the figure leaves out: nobody checked"


@dataclass(frozen=True, kw_only=True)
class NoisePlace:
    """Where a model is perturbed, and what of its batches is public; all of it public.

    Args:
        layer: ``embeddings`` (0), the number of a block counted from 1, or ``output``; or the dotted name of such a module.
            In an architecture that is not known, the dotted name of a module that every path goes through.
        sequence_length: tokens of every padded sequence. Batches of another length are refused: a length that follows the
            text gives it away.
        dataset_size: records in the training data, N.
        lengths: ``hidden`` lets the layers that follow attend to padding too, since their mask would show each length;
            ``public`` leaves the mask alone, and the card says so.
        public_texts: what an encoder or the layers below the noise learned from, for the card.
    """

    layer: Layer
    sequence_length: int
    dataset_size: int
    lengths: str = "hidden"
    public_texts: Sequence[PublicText] = ()

    def __post_init__(self) -> None:
        integer(1, sequence_length=self.sequence_length, dataset_size=self.dataset_size)
        one_of(("hidden", "public"), lengths=self.lengths)


class _LayerReached(Exception):
    """Ends a forward pass at the perturbed layer; carries the hidden state there, or its noisy code."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class LayerReleases(Releases, ABC):
    """Perturbs the hidden state after a layer of a model, in every forward pass, until `remove`.

    EWFT's forms define `release` and `decode`.

    Attributes:
        frozen_parameters: what precedes the layer, by name, whose gradients were turned off.
        token_labels: whether a batch in training had labels for every token.
        training: whether the last pass that came to the layer released training records.
        inference_releases: rows that were released outside of training.
    """

    def __init__(self, model: nn.Module, settings: NoisePlace, unsafe_seed: int | None):
        self._place, self.padded_length = settings, settings.sequence_length
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        self.inference_releases = 0
        self.blocks: Blocks = find_blocks(model, settings.layer)
        self._check_alone()
        after, module = self.blocks.place(settings.layer)
        if not self.blocks.known and settings.lengths == "hidden":
            raise ValueError(
                "the attention masks of this architecture are not known, so lengths cannot be hidden: pass lengths='public'"
            )
        window = getattr(getattr(self.blocks.base, "config", None), "sliding_window", None)
        if settings.lengths == "hidden" and window is not None and after < len(self.blocks.blocks):
            raise ValueError(
                "this model attends within a sliding window, whose mask cannot hide lengths: pass lengths='public'"
            )
        self.frozen_parameters: list[str] = []
        self.token_labels = False
        self.training = self._began_training = False
        self._ids: Tensor | None = None
        self._mask: Tensor | None = None
        #: What the present pass is for, if not for the model's output: the ``hidden`` state, its ``code``, or a ``fixed`` one.
        self._tap: str | None = None
        #: Whether the layer is known to be on every path from the tokens to the output.
        self._bottleneck = self.blocks.known
        self._hooks: list[Any] = []
        self._places = (model, module, self.blocks.blocks[after:])

    def attach(self, *, freeze: bool) -> None:
        """Put the hooks in, and freeze what precedes the layer if it is not to be trained."""
        if freeze:
            self._freeze_bottom()
        model, module, later = self._places
        # PEFT calls the forward of the model inside it, past that model's hooks: the outermost is what a user calls.
        self._hooks = [
            model.register_forward_pre_hook(self._take_inputs, with_kwargs=True),
            self.blocks.base.register_forward_pre_hook(self._take_mask, with_kwargs=True),
            module.register_forward_hook(self._perturb),
        ]
        if self._place.lengths == "hidden":
            hide = partial(hide_padding, causal=self.blocks.causal)
            self._hooks += [block.register_forward_pre_hook(hide, with_kwargs=True) for block in later]

    @property
    def attached(self) -> bool:
        return bool(self._hooks)

    def remove(self) -> None:
        """Take the hooks out, so that the model computes as before. Frozen parameters stay so."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.no_grad()
    def read_layer(self, batch: Mapping[str, Any], tap: str) -> Tensor:
        """The ``hidden`` state at the layer, without noise, or its noisy ``code``, which is a counted release.

        The batch holds model inputs; the code is all that its receiver gets.
        """
        base, self._tap = self.blocks.base, tap
        # A pass that was refused on its way to the layer leaves these behind, and they are not of this batch.
        self._ids, self._began_training = None, False
        try:
            with in_mode(base, training=False):
                base(**{key: value for key, value in batch.items() if key not in ("labels", "example_ids")})
        except _LayerReached as reached:
            return reached.hidden
        finally:
            self._tap = None
        raise RuntimeError("the forward pass never came to the perturbed layer")

    def _check_alone(self) -> None:
        hooks = self.blocks.base._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), LayerReleases) for hook in hooks):
            raise ValueError("this model has an EWFT already, and both would perturb: call remove() on the first")

    def _freeze_bottom(self) -> None:
        below = {id(p) for module in self.blocks.before(self._place.layer) for p in module.parameters()}
        for name, parameter in self.blocks.model.named_parameters():
            if id(parameter) in below:
                parameter.requires_grad_(False)
                self.frozen_parameters.append(name)

    def _take_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._ids = self._checked_ids(kwargs.pop("example_ids", None))
        labels = kwargs.get("labels")
        self._began_training = self._trains(module)
        self.token_labels |= self._began_training and isinstance(labels, Tensor) and labels.dim() > 1
        return args, kwargs

    def _trains(self, module: nn.Module) -> bool:
        """Whether a call of this module may be one to learn from: in training mode, with gradients on, or of records by id.

        A mode alone tells nothing: a frozen base is put in evaluation to have no dropout, and its head is trained all the same.
        """
        return module.training or torch.is_grad_enabled() or self._ids is not None

    def _take_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "example_ids" in kwargs:
            self._ids = self._checked_ids(kwargs.pop("example_ids"))
        if not self._bottleneck and self._tap is None:
            self._check_bottleneck(module, args, kwargs)
        mask = argument(module, args, kwargs)
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if self._tap != "hidden":
            self._check_last_token(argument(module, args, kwargs, "input_ids"))
            self._check_positions(argument(module, args, kwargs, "position_ids"))
        return args, kwargs

    def _check_bottleneck(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a layer that something passes by: with its output fixed, other tokens must give the same outputs."""
        ids, began, outputs = self._ids, self._began_training, []
        self._bottleneck, self._tap = True, "fixed"
        try:
            for change in (lambda path, given: given, _other_tokens):
                own_args, own_kwargs = map_leaves((args, kwargs), change)
                with torch.no_grad(), in_mode(module, training=False), unchanged(module):
                    outputs.append([t for t in tensors(module(*own_args, **own_kwargs)) if t.is_floating_point()])
        finally:
            self._tap, self._ids, self._began_training = None, ids, began
        if not all(torch.equal(one, other) for one, other in zip(*outputs, strict=True)):
            self._bottleneck = False
            raise ValueError(
                "the model's output follows its tokens although the layer's output was fixed: name a module that every path "
                "goes through"
            )

    def _check_last_token(self, ids: Tensor | None) -> None:
        """Refuse a batch of a classifier that would read another than the last position, since that tells the length."""
        if self._place.lengths == "public" or not self.blocks.causal or not hasattr(self.blocks.model, "score"):
            return
        config: Any = self.blocks.model.config
        masked = self._mask is not None and not bool(self._mask[:, -1].all())
        # transformers looks for the last token that is not padding in the ids, whatever the mask says.
        padded = ids is not None and config.pad_token_id is not None and bool((ids[:, -1] == config.pad_token_id).any())
        if masked or padded:
            raise ValueError(
                "This classifier's last token that is not padding tells the length. To pad on the left set "
                "tokenizer.padding_side = 'left', or pass lengths='public'."
            )

    def _check_positions(self, positions: Tensor | None) -> None:
        """Refuse positions that skip padding where the blocks after the noise are given them, since that tells the length."""
        # Models that are not causal use positions in their embeddings alone, below the noise.
        if positions is None or self._place.lengths == "public" or not self.blocks.causal or not self._places[2]:
            return
        whole = torch.arange(positions.shape[-1], device=positions.device)
        if bool((positions != whole).any()):
            raise ValueError(
                "position_ids other than 0 to sequence_length - 1 tell the length: leave position_ids out of "
                "the batch, or pass lengths='public'."
            )

    def _perturb(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        self._check_hidden(hidden)
        if self._tap == "hidden":
            raise _LayerReached(hidden)
        if self._tap == "fixed":
            fixed = torch.zeros_like(hidden)
            return (fixed, *output[1:]) if isinstance(output, tuple) else fixed
        # The outermost model may have said so already, and turned gradients off for its base.
        self.training = self._began_training or self._trains(self.blocks.base)
        ids, self._ids, self._began_training = self._ids, None, False
        if self.training and ids is not None and ids.numel() != len(hidden):
            raise ValueError(f"{ids.numel()} example_ids for {len(hidden)} examples: give one for each")
        released = self.release(hidden, self._mask, ids)
        if self._tap == "code":
            raise _LayerReached(released)
        decoded = self.decode(released).to(hidden.dtype)
        return (decoded, *output[1:]) if isinstance(output, tuple) else decoded

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.dim() != 3 or hidden.shape[1] != self._place.sequence_length:
            raise ValueError(
                f"A batch has {hidden.shape[1]} tokens a row, not {self._place.sequence_length}, and tells "
                "lengths. Pad and cut to sequence_length: tokenizer(..., padding='max_length', "
                "truncation=True, max_length=...)."
            )
        if self._tap == "hidden":
            return
        # A recomputation would draw other noise than the forward pass did.
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("the perturbed layer runs again in the backward pass: turn gradient checkpointing off")

    def _checked_ids(self, ids: Any) -> Tensor | None:
        if ids is None:
            return None
        ids = torch.as_tensor(ids).reshape(-1).to("cpu", torch.int64)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self._place.dataset_size):
            raise ValueError(f"example_ids must lie between 0 and dataset_size - 1 = {self._place.dataset_size - 1}")
        if ids.unique().numel() != ids.numel():
            raise ValueError("example_ids holds a record twice in one batch: each is released once")
        return ids

    def examples(self, items: Sequence[Mapping[str, Any]], *, training: bool) -> list[dict[str, Any]]:
        return [{**item, **({"example_ids": number} if training else {})} for number, item in enumerate(items)]

    @abstractmethod
    def release(self, hidden: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
        """Codes [B, ...] of hidden states [B, T, d] of the records ``ids``, counted; ``mask`` [B, T] is 0 at padding."""

    @abstractmethod
    def decode(self, code: Tensor) -> Tensor:
        """The hidden state that what follows goes on with, [B, T, d]."""

    def flaws(self) -> list[str]:
        return [TOKEN_LABELS] if self.token_labels else []

    def described(self) -> dict[str, Any]:
        """The model, for the card."""
        model = self.blocks.model
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {"name": accounting.model_name(model), "trained_parameters": trained}

    def assumptions(self) -> tuple[str, ...]:
        """For the card: what its figure takes for granted about the queries."""
        # Whoever keeps what comes out of such passes can train on it later, and no hook sees that.
        return (_QUERIES,) if self.inference_releases else ()

    def unprotected(self) -> tuple[str, ...]:
        """For the card."""
        public = self._place.lengths == "public"
        return (*SEQUENCES, *(("the length of each sequence",) if public else ()))


def _other_tokens(path: tuple[Any, ...], given: Tensor) -> Tensor:
    """An input of the same shape that holds other tokens; masks, positions and labels stay."""
    if any(word in str(path) for word in ("mask", "label", "position")) or given.dtype == torch.bool:
        return given
    return -given if given.is_floating_point() else torch.where(given > 0, given - 1, given + 1)
