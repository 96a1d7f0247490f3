"""Runs whose privacy enters before or inside the forward pass: EW-FT and SAP, by the config's `method_options`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

import fastdp
import fastdp.files as files
from fastdp.data import IGNORED, Collator, Examples
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.methods import ReadPublic
from fastdp.methods import ewft
from fastdp.methods.blocks import find_blocks
from fastdp.methods.encoding import ADDED
from fastdp.methods.sap import CTI

STATEMENT, PERTURBATION, RELEASES = "statement.json", "perturbation.pt", "releases"
_PRIVATIZER = ("eta", "mechanism", "special", "unknown", "duplicates", "cti")
_FOLLOWS = ("sequence_length", "dataset_size", "output_dir", "resume")
_REHEARSED = ("layer", "noise", "sequence_length", "autoencoder", "max_norm", "lengths")
_ALL = 1 << 53
_PUBLIC_EXAMPLES = 512
_PASSES = 3


class Local(Protocol):
    """What the run of a local method asks of it; its training steps add no noise of their own.

    Attributes:
        train, held_out: the examples to use.
        collator: makes batches of them.
        noise: noise std over the clipping bound, or nan where there is no such thing.
        earlier: releases of the same texts by earlier runs, in words.
    """

    train: Examples
    held_out: Examples | None
    collator: Collator
    noise: float
    earlier: Sequence[str]

    def begin_epoch(self, epoch: int) -> None:
        """Called before each pass over the data, counted from 1."""

    def step(self, batch_size: int) -> None:
        """Called after each update of the model, whose gradients are sums over about ``batch_size`` examples."""

    def epsilon(self) -> float:
        """What was spent on a training record, in the method's own sense; inf if it is no epsilon at all."""

    def privacy(self) -> str:
        """One sentence for the person who started the run."""

    def untouched(self) -> bool:
        """Whether nothing was released so far, apart from what the engine's ledger knows of."""

    def save(self, output: Path) -> None:
        """Write what holds, and what is needed beside the weights."""

    def close(self) -> None:
        """Leave the model as it was, and no record behind of a run that released nothing."""


def open_local(
    config: FinetuneConfig,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    train: Examples,
    held_out: Examples | None,
    read_public: ReadPublic,
) -> Local | None:
    """The local method that a config names; None for the others, and without privacy (epsilon inf).

    Raises:
        ConfigError: for an option that the method does not have, or a value that it refuses.
    """
    options = dict(config.method_options or {})
    try:
        if config.method == "sap":
            return Privatized(config, model, tokenizer, train, held_out, options, read_public)
        if config.method == "ewft" and math.isfinite(float(config.epsilon or 0)):
            return Perturbed(config, model, tokenizer, train, held_out, options, read_public)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"method_options: {error}") from None
    return None


class Privatized:
    """SAP: tokens are replaced by `fastdp.TextPrivatizer` once, before anything is trained on them.

    Options are the privatizer's: ``eta``, ``mechanism``, ``special``, ``unknown``, ``duplicates``, and ``cti``, a mapping of
    the arguments of `CTI.from_texts` with ``public``, a file of public examples in the form of the training data; without
    it the training texts are counted, with ``noise_multiplier``. The held-out texts are privatized too, as those of a
    customer who queries the model will be.
    """

    noise = math.nan
    earlier: Sequence[str] = ()

    def __init__(
        self,
        config: FinetuneConfig,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        train: Examples,
        held_out: Examples | None,
        options: dict[str, Any],
        read_public: ReadPublic,
    ) -> None:
        if config.epsilon is not None:
            raise ConfigError("sap guarantees eta times a distance, not an epsilon: leave epsilon out and set eta")
        if "eta" not in options:
            raise ConfigError("method_options of sap needs eta; `fastdp privatize` shows what one leaves unchanged")
        unknown = [name for name in options if name not in _PRIVATIZER]
        if unknown:
            raise ConfigError(f"method_options of sap has no {unknown[0]!r}; there are {', '.join(_PRIVATIZER)}")
        assert tokenizer.pad_token_id is not None
        self.collator = Collator(tokenizer.pad_token_id)
        if options.get("cti") is not None:
            options["cti"] = self._contributing(options["cti"], config, model, train, read_public)
        self._privatizer = fastdp.TextPrivatizer(model, tokenizer=tokenizer, **options)
        known = [item["labels"] for item in train.items] if self._privatizer.cti else None
        self.train = self._private(train, known)
        self.held_out = None if held_out is None else self._private(held_out, None)

    def _contributing(
        self, options: Any, config: FinetuneConfig, model: nn.Module, train: Examples, read_public: ReadPublic
    ) -> CTI:
        if not isinstance(options, Mapping):
            raise ConfigError(f"cti must be a mapping such as {{form: prior, public: FILE}}, not {options!r}")
        if config.task != "classification":
            raise ConfigError("cti favours tokens that tell classes apart: it needs task: classification")
        arguments = dict(options)
        public = arguments.pop("public", None)
        if public is None:
            texts, labels = [item["input_ids"] for item in train.items], [item["labels"] for item in train.items]
        else:
            found = read_public(str(public), _ALL, self.collator)
            batches, arguments["origin"] = found.batches, found.origin
            masks = [batch["attention_mask"].bool() for batch in batches]
            texts = [
                row[real].tolist() for batch, mask in zip(batches, masks) for row, real in zip(batch["input_ids"], mask)
            ]
            labels = [int(label) for batch in batches for label in batch["labels"]]
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        return CTI.from_texts(
            texts,
            labels,
            classes=len(config.labels or []),
            vocabulary=table.weight.shape[0],
            public=public is not None,
            delta=config.delta,
            **arguments,
        )

    def _private(self, examples: Examples, classes: list[int] | None) -> Examples:
        rows = self._privatizer(
            [item["input_ids"] for item in examples.items],
            labels=classes,
            special_tokens_mask=[item[ADDED] for item in examples.items],
        )
        items = []
        for item, row in zip(examples.items, rows):
            item = {key: value for key, value in item.items() if key != ADDED}
            labels = item["labels"]
            if isinstance(labels, list):
                labels = [IGNORED if label == IGNORED else token for label, token in zip(labels, row)]
            items.append(item | {"input_ids": row, "labels": labels})
        return Examples(items, examples.truncated)

    def begin_epoch(self, epoch: int) -> None:
        """Nothing: every epoch sees the same replaced tokens."""

    def step(self, batch_size: int) -> None:
        """Nothing: only the model is trained."""

    def epsilon(self) -> float:
        """inf: the guarantee is a metric one."""
        return math.inf

    def privacy(self) -> str:
        """The bound, and how much it leaves as it was."""
        statement = self._privatizer.statement()
        if statement["guarantee"] == "none":
            return f"none: {'; '.join(statement['why_no_guarantee'])}"
        share = statement["displacement"]["unchanged"]
        words = f"{statement['bound']}, a token; {share:.1%} of the vocabulary's tokens stay what they are"
        for counts in statement["also"]:
            stated = counts["epsilon"]
            words += (
                f"; epsilon {stated['upper_bound']:.3f} at delta {stated['delta']:g} for the counts, {counts['unit']}"
            )
        return words

    def untouched(self) -> bool:
        """Whatever was drawn stays in memory until the engine's first step."""
        return True

    def save(self, output: Path) -> None:
        """The statement, which is the privatizer's card."""
        files.write(output / STATEMENT, self._privatizer.statement().after(self.earlier).to_json(), public=True)

    def close(self) -> None:
        """Nothing was attached to the model."""


class Perturbed:
    """EW-FT: `fastdp.EWFT` in the model's forward pass, in training and in evaluation.

    Options: ``layer``, ``autoencoder`` (sizes, or none), ``noise`` (``release_once``, ``uniform``, ``dp_forward``,
    ``epoch_weighted`` or ``paper_epoch_weighted``), ``max_norm``, ``lengths``, and for the autoencoder ``public``, a file of
    public examples in the form of the training data, of which ``public_examples`` are used in ``public_passes`` passes.
    ``rehearsal`` trains what lies below the noise on public examples first (`ewft.rehearse`): a mapping of ``public``, a
    file of them, and if wanted ``examples``, ``passes`` and ``learning_rate``.
    """

    earlier: Sequence[str] = ()

    def __init__(
        self,
        config: FinetuneConfig,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        train: Examples,
        held_out: Examples | None,
        options: dict[str, Any],
        read_public: ReadPublic,
    ) -> None:
        if config.epochs != int(config.epochs):
            raise ConfigError("epochs must be a whole number for ewft: its noise belongs to whole passes over the data")
        follows = [name for name in _FOLLOWS if name in options]
        if follows:
            raise ConfigError(
                f"{follows[0]} of ewft follows from the run's own settings: leave it out of method_options"
            )
        public = options.pop("public", None)
        count, passes = options.pop("public_examples", _PUBLIC_EXAMPLES), options.pop("public_passes", _PASSES)
        sizes = options.pop("autoencoder", (64,))
        rehearsal = _rehearsal(options.pop("rehearsal", None), config)
        if sizes is not None and public is None and rehearsal is None:
            raise ConfigError(
                "ewft's autoencoder must learn from public text: name a file with public in method_options, or set "
                "autoencoder: null"
            )
        if public is not None and rehearsal is not None:
            raise ConfigError("with rehearsal the autoencoder learns from its texts: leave public out beside it")
        # Every batch has the one length, so that none tells how long a text is.
        self.collator = Collator(int(tokenizer.pad_token_id or 0), config.max_length)
        schedule = _schedule(options.pop("noise", "release_once"), config, len(train))
        autoencoder: Any = None if sizes is None else tuple(sizes)
        if rehearsal is not None and autoencoder is not None:
            autoencoder = ewft.StackedAutoencoder(find_blocks(model).hidden_size, autoencoder)
        arguments: dict[str, Any] = dict(
            layer=options.pop("layer", "embeddings"),
            noise=schedule,
            sequence_length=config.max_length,
            dataset_size=len(train),
            autoencoder=autoencoder,
            output_dir=Path(str(config.output)) / RELEASES,
            **options,
        )
        if rehearsal is not None:
            _refuse_before_rehearsal(model, arguments)
            shared = {name: value for name, value in arguments.items() if name in _REHEARSED}
            found = read_public(str(rehearsal.pop("public")), int(rehearsal.pop("examples", _ALL)), self.collator)
            ewft.rehearse(model, found.batches, **shared, **rehearsal)
            arguments["public_texts"] = (found.origin,)
        elif public is not None and sizes is not None:
            found = read_public(str(public), int(count), self.collator)
            arguments["public_texts"] = (found.origin,)
        self._ewft = fastdp.EWFT(model, **arguments)
        try:
            if public is not None and self._ewft.autoencoder is not None:
                self._ewft.train_autoencoder([batch for _ in range(int(passes)) for batch in found.batches])
        except BaseException:
            self.close()
            raise
        numbered = [item | {"example_ids": number} for number, item in enumerate(train.items)]
        self.train, self.held_out = Examples(numbered, train.truncated), held_out
        self._decoder = self._ewft.trained_parameters()
        # The engine's optimizer holds the model's parameters alone; these stand beside it and see noisy codes only.
        self._optimizer = torch.optim.AdamW(self._decoder, lr=config.learning_rate) if self._decoder else None
        self.noise = schedule.ratios[-1]

    def begin_epoch(self, epoch: int) -> None:
        """The noise of this epoch, and its release in the ledger."""
        self._ewft.set_epoch(epoch)

    def step(self, batch_size: int) -> None:
        """Train the autoencoder's decoder."""
        if self._optimizer is None:
            return
        for parameter in self._decoder:
            if parameter.grad is not None:
                parameter.grad /= batch_size
        self._optimizer.step()
        self._optimizer.zero_grad()

    def epsilon(self) -> float:
        """Of one user's sequence, over all releases of training; inf where there is no guarantee."""
        return math.inf if self._ewft.flaws() else self._ewft.epsilon()

    def privacy(self) -> str:
        """The figure with its unit, or why there is none."""
        if self._ewft.flaws():
            return f"none: {'; '.join(self._ewft.flaws())}"
        return f"epsilon {self._ewft.epsilon():.3f} at delta {self._ewft.noise.delta:g} for one user's sequence (local)"

    def save(self, output: Path) -> None:
        """The card, and the perturbation's state: the weights alone perturb nothing."""
        self._ewft.card().after(self.earlier).save(output / "card")
        with files.whole(output / PERTURBATION) as aside:
            torch.save(self._ewft.state_dict(), aside)

    def untouched(self) -> bool:
        """Whether no epoch has begun."""
        return self._ewft.ledger.untouched

    def close(self) -> None:
        """Take the hooks out of the model; the ledger stays in the output folder if it holds anything."""
        self._ewft.remove()
        path = self._ewft.ledger.path
        if self.untouched() and path is not None and path.exists():
            path.unlink()
            path.parent.rmdir()


def _refuse_before_rehearsal(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise now what `fastdp.EWFT` would raise of its arguments after minutes of rehearsal."""
    trained = [p for p in model.parameters() if p.requires_grad]
    fastdp.EWFT(model, **arguments | {"output_dir": None}).remove()
    # It froze the layers that are to rehearse.
    for parameter in trained:
        parameter.requires_grad_()


def _rehearsal(options: Any, config: FinetuneConfig) -> dict[str, Any] | None:
    if options is None:
        return None
    known = ("public", "examples", "passes", "learning_rate")
    if not isinstance(options, Mapping) or "public" not in options or not set(options) <= set(known):
        raise ConfigError(
            f"rehearsal must be a mapping of public, a file, and of {', '.join(known[1:])}; not {options!r}"
        )
    return dict(options)


def _schedule(kind: str, config: FinetuneConfig, size: int) -> ewft.NoiseSchedule:
    epochs, epsilon, delta = int(config.epochs), float(config.epsilon or 0), config.delta
    sizes: dict[str, Any] = {"dataset_size": size, "batch_size": config.batch_size}
    schedules: dict[str, Callable[[], ewft.NoiseSchedule]] = {
        "release_once": lambda: ewft.release_once(epsilon, delta),
        "uniform": lambda: ewft.uniform(epochs, epsilon, delta),
        "dp_forward": lambda: ewft.dp_forward(epochs, epsilon, delta),
        "epoch_weighted": lambda: ewft.epoch_weighted(epochs, epsilon, delta, **sizes),
        "paper_epoch_weighted": lambda: ewft.paper_epoch_weighted(epochs=epochs, epsilon=epsilon, delta=delta, **sizes),
    }
    if kind not in schedules:
        raise ConfigError(f"noise of ewft is {kind!r}: choose one of {', '.join(schedules)}")
    return schedules[kind]()
