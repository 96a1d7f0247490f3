"""The model of a federated run: a public base that every machine loads for itself, and the adapter that travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastdp.accounting.weights import named_digest
from fastdp.data import Collator, Examples
from fastdp.federated.config import FederatedConfig
from fastdp.finetune.config import FinetuneConfig
from fastdp.finetune.evaluation import Quality, evaluate
from fastdp.finetune.models import load_tokenizer, load_trained, restore_trained, trained_names, trained_state
from fastdp.methods.encoding import encode_private
from fastdp.methods.selective.perturbation import labels_of
from fastdp.tables import read_rows
from fastdp.validate import usable_device


@dataclass
class AdaptedModel:
    """A base model with its adapter.

    Attributes:
        base: digest of everything that is not trained, by which machines know that they mean the same model.
    """

    config: FederatedConfig
    tokenizer: Any
    model: nn.Module
    base: str

    @classmethod
    def load(cls, config: FederatedConfig) -> AdaptedModel:
        """Load the base, and make an adapter from the run's seed. Raises ConfigError as `fastdp finetune` does."""
        shared = ("model", "peft", "bottleneck_size", "lora_r", "lora_alpha", "max_length", "seed")
        settings = FinetuneConfig(**{name: getattr(config, name) for name in shared})
        tokenizer = load_tokenizer(settings)
        model = load_trained(settings, tokenizer).to(usable_device(config.device))
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        return cls(config, tokenizer, model, named_digest(frozen))

    @property
    def adapter(self) -> dict[str, Tensor]:
        """A copy of the adapter."""
        return trained_state(self.model, trained_names(self.model))

    @adapter.setter
    def adapter(self, state: dict[str, Tensor]) -> None:
        names = trained_names(self.model)
        restore_trained(self.model, {name: state[name] for name in names}, names)

    @property
    def collator(self) -> Collator:
        """Pads with the tokenizer's padding token."""
        return Collator(self.tokenizer.pad_token_id)

    def texts(self, path: str) -> list[str]:
        return read_rows(path).column(self.config.text_column, "text_column")

    def examples(self, ids: list[list[int]], read_only: list[list[bool]] | None = None) -> Examples:
        """Token ids of texts, begun and ended as the tokenizer does, every token to be learned.

        Args:
            read_only: tokens that are read and not learned; a text of nothing else is learned all the same.
        """
        start = [token for token in [self.tokenizer.bos_token_id] if token is not None]
        end = [token for token in [self.tokenizer.eos_token_id] if token is not None]
        items = []
        for own, hidden in zip(ids, [[False] * len(own) for own in ids] if read_only is None else read_only):
            full = (start + own + end)[: self.config.max_length]
            marks = ([False] * len(start) + hidden + [False] * len(end))[: len(full)]
            items.append({"input_ids": full, "labels": labels_of(full, marks)})
        longest = self.config.max_length - len(start) - len(end)
        return Examples(items, sum(len(own) > longest for own in ids))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids without special tokens, cut to the room that `max_length` leaves."""
        return [own[: self.room] for own in encode_private(self.tokenizer, texts)["input_ids"]]

    @property
    def room(self) -> int:
        """Tokens of a text that fit into an example."""
        return max(1, self.config.max_length - self.tokenizer.num_special_tokens_to_add() - 2)

    def quality(self, examples: Examples) -> Quality:
        return evaluate(self.model, examples, self.collator, self.config.eval_batch_size, "causal-lm")
