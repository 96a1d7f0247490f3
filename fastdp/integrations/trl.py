"""trl's trainers, private: `DPSFTTrainer`, which packs by the example, and `DPDPOTrainer`, whose unit is a pair.

Both put the mixin `fastdp.integrations.trainer.PrivateTraining` in front of trl's class. Data preparation, evaluation, saving
and callbacks are trl's; a training step is the engine's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments
from trl import DPOTrainer, SFTTrainer

from fastdp.integrations.trainer import PrivateTraining

#: The batch entry that names the example of every packed token.
_UNITS = "token_units"
_REFUSED: dict[str, tuple[Any, str]] = {
    **PrivateTraining.refused,
    "use_liger_kernel": (False, "its fused loss averages over all tokens of a batch"),
    "activation_offloading": (False, "bound memory by privacy.max_physical_batch_size, or by gradient checkpointing"),
    "router_aux_loss_coef": (0, "balancing experts over a batch couples its examples"),
}


@dataclass
class PackingCollator:
    """Packs the examples of a micro-batch into rows, each example whole, in the order in which they come.

    Beside ``input_ids``, ``labels`` and ``position_ids`` ``[rows, tokens]``, which start anew with each example, it returns
    ``token_units``, the number of every token's example (-1 for padding), for `fastdp.make_private`'s ``unit_map``.

    Args:
        pad_token_id: fills the ends of rows.
        max_length: most tokens in a row, unless one example alone has more.
    """

    pad_token_id: int
    max_length: int

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Examples with ``input_ids`` and, unless all tokens are to be learnt, ``labels``."""
        rows: list[list[int]] = [[]]
        filled = 0
        for number, example in enumerate(examples):
            length = len(example["input_ids"])
            if rows[-1] and filled + length > self.max_length:
                rows.append([])
                filled = 0
            rows[-1].append(number)
            filled += length
        columns: dict[str, list[list[int]]] = {name: [] for name in ("input_ids", "labels", "position_ids", _UNITS)}
        for row in rows:
            members = [(number, examples[number]) for number in row]
            columns["input_ids"].append([token for _, e in members for token in e["input_ids"]])
            columns["labels"].append([label for _, e in members for label in e.get("labels", e["input_ids"])])
            columns["position_ids"].append([place for _, e in members for place in range(len(e["input_ids"]))])
            columns[_UNITS].append([number for number, e in members for _ in e["input_ids"]])
        fill = {"input_ids": self.pad_token_id, "labels": -100, "position_ids": 0, _UNITS: -1}
        width = max(map(len, columns[_UNITS]))
        return {
            name: torch.tensor([row + [fill[name]] * (width - len(row)) for row in found])
            for name, found in columns.items()
        }


def _columns_read(first: Mapping[str, Any], field: str | None) -> list[str]:
    """Columns that trl reads of rows like the first; ``field`` is dataset_text_field, None for pairs."""
    if field is not None and "messages" in first:
        return ["messages"]
    prompt = ["prompt"] if "prompt" in first else []
    if field is None:
        return [*prompt, "chosen", "rejected"]
    return [*prompt, "completion"] if prompt else [field]


@contextmanager
def _data_errors(field: str | None, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Replace trl's errors about rows by ones that name row, column and argument; ``field`` as in `_columns_read`."""
    rows: Any = kwargs.get("train_dataset") or ()
    try:
        yield
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        has_a_reason = isinstance(error, ValueError)
        if isinstance(error, StopIteration) or (has_a_reason and "torch.cat" in str(error)):
            raise ValueError("train_dataset holds no example: raise max_length if it cut every one") from error
        first: Mapping[str, Any] = next(iter(rows), {})
        needs = _columns_read(first, field)
        template = getattr(kwargs.get("processing_class"), "chat_template", "")
        if not template and any(isinstance(first.get(name), list) for name in needs):
            raise ValueError(
                "The tokenizer has no chat template. Set it, or give texts in place of messages."
            ) from error
        for number, row in enumerate(() if has_a_reason else rows):
            for name in needs:
                if name not in row:
                    what = f"dataset_text_field is {name!r}" if name == field else f"train_dataset needs {name!r}"
                    raise ValueError(f"{what}, which no example has: its columns are {', '.join(row)}") from error
                if not isinstance(row[name], (str, list)):
                    raise ValueError(f"{name!r} of row {number} in train_dataset is no text: leave it out") from error
        raise


class DPSFTTrainer(PrivateTraining, SFTTrainer):
    """`trl.SFTTrainer` that trains privately; see `PrivateTraining`.

    An example's loss is the mean over its own tokens. With ``packing=True`` examples are drawn at random, as privacy asks, and
    packed afterwards, those of a micro-batch into rows of ``max_length``; each is clipped on its own.

    Args:
        privacy: `PrivacyArguments`; everything else is as for that trainer. Raises ValueError as `PrivateTraining` does.
    """

    refused: ClassVar[dict[str, tuple[Any, str]]] = {
        **_REFUSED,
        "loss_type": ("nll", "leave it out, or give PrivacyArguments(criterion=), which returns one loss a row"),
        "padding_free": (False, "set packing=True, which packs examples and keeps them apart"),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        arguments: Any = kwargs.get("args") or (args[1] if len(args) > 1 else None)
        # trl packs before the loader samples, so its samples would be packed rows. We pack after sampling examples.
        self._packs = bool(getattr(arguments, "packing", False))
        eval_packing = getattr(arguments, "eval_packing", None)
        if self._packs:
            arguments.packing, arguments.eval_packing = False, False
        try:
            with _data_errors(getattr(arguments, "dataset_text_field", "text"), kwargs):
                super().__init__(*args, **kwargs)
        finally:
            if self._packs:
                arguments.packing, arguments.eval_packing = True, eval_packing
        given, kept = kwargs.get("train_dataset"), self.train_dataset
        if isinstance(given, Sized) and isinstance(kept, Sized) and 0 < len(kept) < len(given):
            warnings.warn(
                f"{len(given) - len(kept)} of {len(given)} rows of train_dataset have no token to learn within max_length, and "
                "are left out: raise it, or remove them",
                stacklevel=2,
            )

    def private_collator(self) -> Any:
        """trl's own, or one that packs."""
        if not self._packs:
            return self.data_collator
        return PackingCollator(self.processing_class.pad_token_id or 0, self.args.max_length)

    def private_options(self) -> dict[str, Any]:
        """The map from packed tokens to examples."""
        return {"unit_map": _UNITS} if self._packs else {}

    def private_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """The model's own loss, or the user's."""
        return super().private_loss(model, {**inputs, "use_cache": False})

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """In training the model's own loss, by the example; trl's is a mean over all tokens of a batch."""
        if self.model.training:
            return Trainer.compute_loss(self, model, inputs, return_outputs)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@dataclass
class _PairCollator:
    """A batch whose row is a pair: ``[pairs, 2, tokens]`` instead of the chosen ones and then the rejected."""

    collator: Any

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        stacked = self.collator(examples)
        return {
            name: tensor if tensor.dim() == 1 else tensor.unflatten(0, (2, len(examples))).transpose(0, 1).contiguous()
            for name, tensor in stacked.items()
        }


class PairLoss(torch.nn.Module):
    """A language model whose forward takes pairs and returns the mean of their DPO losses (arXiv 2305.18290, equation 7).

    Args:
        model: the policy.
        beta: strength of the pull towards the reference.
        kind: ``sigmoid``, or ``ipo`` (arXiv 2310.12036, equation 17, of log-probabilities a token).
    """

    def __init__(self, model: torch.nn.Module, beta: float, kind: str):
        super().__init__()
        self.model, self.beta, self.kind = model, beta, kind

    @property
    def config(self) -> Any:
        """The policy's."""
        return self.model.config

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        completion_mask: torch.Tensor,
        ref_chosen_logps: torch.Tensor,
        ref_rejected_logps: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """``[pairs, 2, tokens]``, chosen before rejected, and the reference's log-probabilities ``[pairs]`` -> ``loss``."""
        ids, mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
        completion = completion_mask.flatten(0, 1)[:, 1:]
        token_logps = -F.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none")
        logps = (token_logps * completion).sum(1).unflatten(0, (-1, 2))
        ratios = logps - torch.stack([ref_chosen_logps, ref_rejected_logps], 1)
        if self.kind == "ipo":
            ratios = ratios / completion.sum(1).unflatten(0, (-1, 2)).clamp(min=1)
            margins = ratios[:, 0] - ratios[:, 1]
            return {"loss": F.mse_loss(margins, torch.full_like(margins, 1 / (2 * self.beta)))}
        margins = self.beta * (ratios[:, 0] - ratios[:, 1])
        # -log sigmoid of the margins, by a loss function that the engine splits by rows.
        return {"loss": F.binary_cross_entropy_with_logits(margins, torch.ones_like(margins))}


class DPDPOTrainer(PrivateTraining, DPOTrainer):
    """`trl.DPOTrainer` that trains privately; see `PrivateTraining`.

    The unit is a pair, its prompt with it. Log-probabilities of the reference are computed beforehand, whatever
    ``precompute_ref_log_probs`` says, and for each pair alone: in a batch their rounding would depend on other pairs' lengths.

    Args:
        privacy: `PrivacyArguments`; everything else is as for that trainer. Raises ValueError as `PrivateTraining` does.
    """

    refused: ClassVar[dict[str, tuple[Any, str]]] = {
        **_REFUSED,
        "label_smoothing_factor": (0, "the losses of pairs have no labels to smooth"),
        "sync_ref_model": (False, "the reference must stay as it was, so that its log-probabilities hold"),
        "use_weighting": (False, "only the plain losses of pairs are known to the engine"),
        "ld_alpha": (None, "only the plain losses of pairs are known to the engine"),
        "f_divergence_type": ("reverse_kl", "only the plain losses of pairs are known to the engine"),
        "padding_free": (False, "rows are pairs, and padded"),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        with _data_errors(None, kwargs):
            super().__init__(*args, **kwargs)

    def _check_arguments(self, arguments: TrainingArguments, kwargs: dict[str, Any]) -> None:
        super()._check_arguments(arguments, kwargs)
        if arguments.loss_type not in ("sigmoid", ["sigmoid"], "ipo", ["ipo"]):
            raise ValueError(
                f"loss_type {arguments.loss_type} cannot be used with DPDPOTrainer: choose 'sigmoid' or 'ipo'"
            )
        arguments.precompute_ref_log_probs, arguments.precompute_ref_batch_size = True, 1

    def private_model(self) -> torch.nn.Module:
        """The policy, with the loss of pairs around it."""
        if self.privacy.criterion is not None or self.computes_loss:
            raise ValueError(
                "DPDPOTrainer computes the losses of pairs itself. Leave criterion, compute_loss_func and compute_loss out."
            )
        self._pairs = PairLoss(self.model, self.args.beta, self.loss_types[0])
        return self._pairs

    def private_collator(self) -> Any:
        """trl's, with a pair to each row."""
        return _PairCollator(self.data_collator)

    def private_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """The mean over the pairs of their losses."""
        # accelerate's autocast covers the policy alone. The reference ran under autocast too, and both must agree.
        with self.accelerator.autocast():
            return self._pairs(**inputs)["loss"]
