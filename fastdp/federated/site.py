"""One client: its texts, perturbed once; its local training; its card. Nothing here knows of the network."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import fastdp
import fastdp.files as files
from fastdp.data import IGNORED, Examples
from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.config import FederatedConfig
from fastdp.federated.policy import ClientRefusal
from fastdp.methods.selective import (
    AnyOf,
    DetectorQuality,
    PresidioDetector,
    PrivacyDetector,
    PrivacyPolicy,
    RuleDetector,
    SelectivePerturbation,
    TokenClassificationDetector,
    measure_detector,
    read_labelled_spans,
)
from fastdp.public import PublicGate
from fastdp.untrusted import load_pretrained, load_pretrained_tokenizer, read_text


@dataclass(frozen=True)
class FitResult:
    """What a round of local training says besides the adapter.

    Attributes:
        examples: size of the client's data set.
        seconds: of training alone. None with DP-SGD, where they follow from how many examples each step drew.
        loss: mean training loss of the last pass, without noise: a function of what was trained on, raw or perturbed. None
            with DP-SGD, whose epsilon covers the adapter and would not cover this.
    """

    examples: int
    seconds: float | None
    loss: float | None


class Site:
    """A client's data and how it trains.

    Args:
        adapted: the model, shared by the clients of a process.
        name: of the client; names its folder below ``state``.
        texts: its own texts; private.

    Raises:
        ClientRefusal: for no text at all.
        ValueError: for what `SelectivePerturbation` refuses.
    """

    def __init__(self, adapted: AdaptedModel, name: str, texts: list[str]) -> None:
        if not texts:
            raise ClientRefusal(f"{name} holds no example: give it data, or leave it out of the run")
        self.adapted = adapted
        self.config = adapted.config
        self.name = name
        self.folder = client_state_folder(self.config) / name
        files.make_folder(self.folder)
        self.examples = self._prepare(texts)

    @classmethod
    def of_partition(cls, adapted: AdaptedModel, index: int, clients: int) -> Site:
        """Client number ``index`` of ``clients``: its share of the ``train`` file, or all of a file of its own."""
        config = adapted.config
        if not config.train:
            raise ClientRefusal("a simulation needs train, the file that its clients share: set it in the run config")
        texts = adapted.texts(config.train)
        if config.partition == "iid":
            # Every process of a simulation deals the same rows.
            dealt = np.random.default_rng([config.seed, len(texts), clients]).permutation(len(texts))
            texts = [texts[row] for row in np.array_split(dealt, clients)[index]]
        return cls(adapted, f"client-{index}", texts)

    def _prepare(self, texts: list[str]) -> Examples:
        config, adapted = self.config, self.adapted
        if config.perturbation == "none":
            return adapted.examples(adapted.encode(texts))
        detector = RuleDetector() if config.perturbation == "all" else make_detector(config)
        perturb = SelectivePerturbation(
            config.epsilon,
            config.mechanism,
            budget=config.budget,
            radius=config.radius or None,
            alpha=config.alpha,
            replacement=config.replacement,
            scope="all" if config.perturbation == "all" else "private",
            detector=detector,
            policy=PrivacyPolicy(threshold=config.threshold),
        )
        cache = self.folder / "perturbed.safetensors"
        found = perturb(texts, adapted.tokenizer, adapted.model, max_length=adapted.room, cache=cache)
        quality = None if perturb.scope == "all" else _quality(config, detector, texts)
        found.card(quality).save(self.folder / "card")
        # What was drawn at random is nothing to learn, unless nothing else is left.
        learned = config.learn_replaced or perturb.scope == "all"
        return adapted.examples(found.ids, None if learned else found.private)

    def fit(self, round_number: int) -> FitResult:
        """Train the model's adapter on this client's examples for a round's passes."""
        config = self.config
        # A seed that is the same in every process, unlike `hash` of a text.
        own = hashlib.sha256(repr((config.seed, self.name, round_number)).encode()).digest()
        torch.manual_seed(int.from_bytes(own[:7], "little"))
        model = self.adapted.model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)
        size = min(config.batch_size, len(self.examples))
        loader: Any = DataLoader(self.examples, batch_size=size, shuffle=True, collate_fn=self.adapted.collator)
        if config.dpsgd_epsilon > 0:
            self._fit_privately(model, optimizer, loader)
            return FitResult(len(self.examples), None, None)
        begin = time.perf_counter()
        loss = _passes(model, optimizer, loader, config.local_epochs, config.physical_batch_size)
        return FitResult(len(self.examples), time.perf_counter() - begin, loss)

    def _fit_privately(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> None:
        config = self.config
        private = fastdp.make_private(
            model,
            optimizer,
            loader,
            method=fastdp.DPSGD(max_grad_norm=config.dpsgd_max_grad_norm),
            target_epsilon=config.dpsgd_epsilon,
            target_delta=config.dpsgd_delta,
            epochs=config.rounds * config.local_epochs,
            max_physical_batch_size=config.physical_batch_size,
            output_dir=self.folder,
            resume=(self.folder / "ledger.jsonl").exists(),
        )
        # The next round goes on with it.
        private.ending.expect()
        try:
            _passes(model, optimizer, private.data_loader, config.local_epochs, config.physical_batch_size)
            private.card().save(self.folder / "card_dpsgd")
        finally:
            private.detach()


def _passes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any, epochs: int, rows: int) -> float:
    """Mean loss of the last pass, over batches of which ``rows`` examples are in memory at once."""
    device = next(model.parameters()).device
    loss, batches = torch.zeros((), device=device), 0
    for _ in range(epochs):
        loss, batches = torch.zeros((), device=device), 0
        for batch in loader:
            parts = [dict(zip(batch, part)) for part in zip(*(value.split(rows) for value in batch.values()))]
            learned = [int((part["labels"][:, 1:] != IGNORED).sum()) for part in parts]
            for part, tokens in zip(parts, learned):
                if not tokens and len(parts) > 1:
                    continue  # Its mean is no number.
                found = model(**{key: value.to(device) for key, value in part.items()}).loss
                # A batch's loss is the mean over its tokens.
                found = found * (tokens / sum(learned)) if len(parts) > 1 else found
                found.backward()
                loss += found.detach()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    return float(loss) / max(batches, 1)


def client_state_folder(config: FederatedConfig) -> Path:
    """Where clients keep what must survive a round; by default beside the server's folder, in a simulation."""
    return Path(config.state) if config.state else Path(config.output) / "clients"


def make_detector(config: FederatedConfig) -> PrivacyDetector:
    """The detector that the settings name; several joined by " + " find what any of them does.

    Raises:
        ValueError: if names are given to a detector that has no list of them.
    """
    kinds = config.detector.split(" + ")
    if config.names and "rules" not in kinds:
        raise ValueError(f"names are for the rule detector; the detector is {config.detector}")
    found = [_detector(kind, config.names) for kind in kinds]
    return found[0] if len(found) == 1 else AnyOf(tuple(found))


def _detector(kind: str, names: str) -> PrivacyDetector:
    if kind == "rules":
        listed = read_text(names).split("\n") if names else []
        return RuleDetector(names=frozenset(name.strip() for name in listed if name.strip()))
    if kind == "presidio":
        return PresidioDetector()
    from transformers import AutoModelForTokenClassification

    model = load_pretrained(AutoModelForTokenClassification, kind)
    return TokenClassificationDetector(model, load_pretrained_tokenizer(kind))


def _quality(config: FederatedConfig, detector: PrivacyDetector, private: list[str]) -> DetectorQuality | None:
    """What the detector misses, for the card: measured on labelled texts that must not be the private ones."""
    if not config.labelled_spans:
        return None
    texts, labels = read_labelled_spans(config.labelled_spans)
    PublicGate(private, [config.train]).admit(config.labelled_spans, texts)
    policy = PrivacyPolicy(threshold=config.threshold)
    return measure_detector(detector, texts, labels, policy, corpus=Path(config.labelled_spans).name)
