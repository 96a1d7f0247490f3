"""Runs whose privacy enters before or inside the forward pass, by the config's `method_options`: EW-FT, SAP, selective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from fastdp.data import Examples
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.methods import Central, ReadPublic, check_names
from fastdp.methods import ewft
from fastdp.methods.blocks import find_blocks
from fastdp.methods.perturbation import Releases
from fastdp.methods.removed import removed_key, sentence
from fastdp.methods.response import check_response
from fastdp.methods.sap import CTI, SAPPerturbation
from fastdp.methods.selective import RuleDetector, SelectivePerturbation
from fastdp.settings import convert_value, types_of

RELEASES = "releases"
#: More examples than any file has: all of them are read.
_ALL = 1 << 53
#: A bound on norms that no hidden state comes near.
_UNCLIPPED = 1e9
_CTI_OPTIONS = ["public", "form", "noise_multiplier", "max_norm", "min_support", "tilt", "cells", "told_at"]


@dataclass(frozen=True)
class Subject:
    """What a perturbation is opened on: the model and tokenizer, which are public, and the training examples, which are not."""

    config: FinetuneConfig
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    train: Examples
    read_public: ReadPublic


#: Opens a perturbation; its options were checked when it was made.
Opening = Callable[[Subject], Releases]


def choose_perturbation(config: FinetuneConfig) -> Opening:
    """What opens a config's local method on its subject; for any other method, and EW-FT at epsilon inf, `Central`.

    Raises:
        ConfigError: for an option that the method does not have, or a value that it refuses, before anything is read.
    """
    kinds: dict[str, Callable[[FinetuneConfig], Opening]] = {"sap": _sap, "ewft": _ewft, "selective": _selective}
    if config.method not in kinds or (config.method == "ewft" and math.isinf(float(config.epsilon or 0))):
        return lambda subject: Central()
    opening = _with_config_errors(kinds[config.method], config)
    return lambda subject: _with_config_errors(opening, subject)


def _with_config_errors(call: Callable[[Any], Any], argument: Any) -> Any:
    """Call it, and name ``method_options`` in the errors of a method's own checks."""
    try:
        return call(argument)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"method_options: {error}") from None


def _sap(config: FinetuneConfig) -> Opening:
    """`fastdp.TextPrivatizer`: tokens are replaced once, before anything is trained on them, and those of queries too.

    Options are the privatizer's: ``eta`` (in the quotient form of CTI ``epsilon``, of one token), ``mechanism``,
    ``unknown``, ``duplicates``, and ``cti``, a mapping of the arguments of `CTI.from_texts` with ``public``, a file of public
    examples in the form of the training data; without it the training texts are counted, with ``noise_multiplier``.
    """
    options = dict(config.method_options or {})
    if config.epsilon is not None:
        raise ConfigError(
            "sap guarantees eta times a distance, not an epsilon: leave epsilon out, and set eta in method_options."
        )
    if "eta" not in options and "epsilon" not in options:
        raise ConfigError("method_options of sap needs eta; `fastdp privatize` shows what one leaves unchanged")
    check_names(SAPPerturbation, options)
    cti = options.pop("cti", None)
    if cti is None:
        settings = SAPPerturbation(**options)
        return lambda subject: settings.open(subject.model, tokenizer=subject.tokenizer)
    if not isinstance(cti, Mapping):
        raise ConfigError(f"cti must be a mapping such as {{form: prior, public: FILE}}, not {cti!r}")
    if config.task != "classification":
        raise ConfigError("cti favours tokens that tell classes apart: it needs task: classification")
    check_names(CTI, cti, "cti", _CTI_OPTIONS)
    _check_sap(options, cti.get("form"))
    return lambda subject: SAPPerturbation(**options, cti=_count_cti(dict(cti), subject)).open(
        subject.model, tokenizer=subject.tokenizer
    )


def _selective(config: FinetuneConfig) -> Opening:
    """`fastdp.SelectivePerturbation`: tokens that the rule detector takes for private are replaced once, and not learned.

    Options are the perturbation's: ``epsilon``, of a private token, ``mechanism``, ``replacement``, ``budget``, ``radius``,
    ``alpha`` and ``scope``; and ``names``, a list of names of one's own that the detector finds besides.
    """
    options = dict(config.method_options or {})
    if config.epsilon is not None:
        raise ConfigError(
            "selective guarantees an epsilon of each private token, not of an example: leave epsilon out and set it in "
            "method_options"
        )
    if "epsilon" not in options:
        raise ConfigError("method_options of selective needs epsilon, of a private token")
    names = frozenset(str(name) for name in options.pop("names", ()))
    known = [field.name for field in dataclasses.fields(SelectivePerturbation)]
    check_names(SelectivePerturbation, options, known=[name for name in known if name not in ("detector", "policy")])
    settings = SelectivePerturbation(**options, detector=RuleDetector(names=names))
    return lambda subject: settings.open(subject.model, tokenizer=subject.tokenizer)


def _check_sap(options: dict[str, Any], form: Any) -> None:
    """Refuse, before counts are made, what `SAPPerturbation` would refuse after."""
    if (form == "quotient") != ("epsilon" in options) or (form == "quotient") == ("eta" in options):
        raise ConfigError(
            "method_options of sap takes epsilon, of a token, with cti in form: quotient, and eta with any other"
        )
    plain = {name: value for name, value in options.items() if name not in ("mechanism", "epsilon")}
    SAPPerturbation(**({"eta": 1.0} | plain))
    if form == "quotient":
        check_response(2, options["epsilon"])


def _count_cti(options: dict[str, Any], subject: Subject) -> CTI:
    """Count which tokens contribute to the classes: in the public file, or else in the training texts."""
    path = options.pop("public", None)
    if path is None:
        texts, labels = ([item[key] for item in subject.train.items] for key in ("input_ids", "labels"))
    else:
        public = subject.read_public(str(path), _ALL)
        options["origin"] = public.origin
        pairs = [pair for batch in public.batches for pair in zip(batch["input_ids"], batch["attention_mask"].bool())]
        texts = [row[real].tolist() for row, real in pairs]
        labels = [int(label) for batch in public.batches for label in batch["labels"]]
    table: Any = subject.model.get_input_embeddings()  # type: ignore[operator]
    return CTI.from_texts(
        texts,
        labels,
        classes=len(subject.config.labels or []),
        vocabulary=table.weight.shape[0],
        public=path is not None,
        delta=subject.config.delta,
        **options,
    )


@dataclass(frozen=True, kw_only=True)
class _PublicStage:
    """Public text for what lies below EW-FT's noise, and how to train on it: the autoencoder, or the layers (``rehearsal``)."""

    public: str
    examples: int
    passes: int = 3
    learning_rate: float | None = None


def _ewft(config: FinetuneConfig) -> Opening:
    """`fastdp.EWFT` in the model's forward pass, in training and in evaluation.

    Options are those of `EWFTSettings` that the run does not settle, with ``noise`` one of ``release_once``,
    ``dp_forward`` and ``paper_epoch_weighted``; and for the autoencoder ``public``, a file of public examples in the form of
    the training data.
    ``rehearsal`` trains what lies below the noise on public examples first (`ewft.rehearse`): a mapping of ``public``, a
    file of them, and if wanted ``examples``, ``passes`` and ``learning_rate``. With ``noise: codebook`` (and ``cells``) it
    is `ewft.PureEWFT`, whose encoder learns from ``public`` or the rehearsal's texts.
    """
    if (config.method_options or {}).get("noise") == "codebook":
        return _pure(config)
    options = {"layer": "embeddings", "noise": "release_once", "autoencoder": (64,), **(config.method_options or {})}
    if config.epochs != int(config.epochs):
        raise ConfigError("epochs must be a whole number for ewft: its noise belongs to whole passes over the data")
    for name in ("sequence_length", "dataset_size", "output_dir", "resume", "public_texts"):
        if name in options:
            raise ConfigError(f"{name} of ewft follows from the run's own settings: leave it out of method_options")
    autoencoder, rehearsal = _autoencoder_text(options), _rehearsal(options.pop("rehearsal", None))
    check_names(ewft.EWFTSettings, options)
    if options["autoencoder"] is not None and autoencoder is None and rehearsal is None:
        raise ConfigError(
            "ewft's autoencoder must learn from public text: name a file with public in method_options, or set "
            "autoencoder: null"
        )
    if autoencoder is not None and rehearsal is not None:
        raise ConfigError("with rehearsal the autoencoder learns from its texts: leave public out beside it")
    noise = options.pop("noise")
    if (key := removed_key(f"ewft.{noise}")) is not None:
        raise ConfigError(f"noise {noise}: {sentence(key)}")
    if noise not in _SCHEDULES:
        raise ConfigError(f"noise of ewft is {noise!r}: choose one of {', '.join([*_SCHEDULES, 'codebook'])}")
    # Check the other options now: this noise and number of records only stand for the run's.
    checked = ewft.NoiseSchedule(noise, (1.0,), config.delta, reuse=noise == "release_once")
    plain = ewft.EWFTSettings(noise=checked, sequence_length=config.max_length, dataset_size=1, **options)

    def open_on(subject: Subject) -> Releases:
        schedule = _SCHEDULES[noise](config, len(subject.train))
        settings = dataclasses.replace(plain, noise=schedule, dataset_size=len(subject.train))
        return _open(settings, subject, autoencoder, rehearsal)

    return open_on


def _pure(config: FinetuneConfig) -> Opening:
    """`ewft.PureEWFT`, which releases one code of each example, drawn once whatever the number of passes."""
    options = {"layer": "output", **(config.method_options or {})}
    del options["noise"]
    cells = options.pop("cells", 2)
    public, rehearsal = _autoencoder_text(options), _rehearsal(options.pop("rehearsal", None))
    check_names(ewft.PureEWFT, options, known=["layer", "lengths"])
    source = public or rehearsal
    if source is None or (public is not None and rehearsal is not None):
        raise ConfigError(
            "The encoder of ewft's codebook learns from public text. Name a file as public in method_options, "
            "or as rehearsal."
        )
    mechanism = ewft.codebook(cells, _epsilon(config))
    plain = ewft.NoisePlace(sequence_length=config.max_length, dataset_size=1, **options)

    def open_on(subject: Subject) -> Releases:
        found = subject.read_public(source.public, source.examples, plain.sequence_length)
        place = dataclasses.replace(plain, dataset_size=len(subject.train), public_texts=(found.origin,))

        def attach(model: nn.Module) -> ewft.PureEWFT:
            return ewft.PureEWFT(model, mechanism=mechanism, **vars(place))

        if rehearsal is not None:
            # Without noise or clipping: the text is public, and the private release is a code that is drawn later.
            silent = ewft.NoiseSchedule("none", (0.0,), subject.config.delta)
            _rehearse(attach, place, subject, rehearsal, found.batches, noise=silent, max_norm=_UNCLIPPED)
        made = attach(subject.model)
        try:
            made.learn(found.batches)
        except BaseException:
            made.discard()
            raise
        return made

    return open_on


def _rehearse(
    attach: Callable[[nn.Module], Releases],
    place: ewft.NoisePlace,
    subject: Subject,
    rehearsal: _PublicStage,
    batches: Iterable[Mapping[str, Any]],
    **others: Any,
) -> None:
    """Train the layers below the noise on public text."""
    trained = [p for p in subject.model.parameters() if p.requires_grad]
    # Attaching refuses an unfit model before minutes of training; it also freezes the layers that are to be trained.
    attach(subject.model).remove()
    for parameter in trained:
        parameter.requires_grad_()
    if rehearsal.learning_rate is not None:
        others["learning_rate"] = rehearsal.learning_rate
    shared: dict[str, Any] = {name: getattr(place, name) for name in ("layer", "sequence_length", "lengths")}
    ewft.rehearse(subject.model, batches, passes=rehearsal.passes, **shared, **others)


def _open(
    settings: ewft.EWFTSettings, subject: Subject, autoencoder: _PublicStage | None, rehearsal: _PublicStage | None
) -> ewft.EWFT:
    if rehearsal is not None:
        if settings.autoencoder is not None:
            width = find_blocks(subject.model).hidden_size
            sizes: Any = settings.autoencoder
            settings = dataclasses.replace(settings, autoencoder=ewft.StackedAutoencoder(width, sizes))
        public = subject.read_public(rehearsal.public, rehearsal.examples, settings.sequence_length)
        shared: dict[str, Any] = {name: getattr(settings, name) for name in ("noise", "max_norm", "autoencoder")}
        _rehearse(settings.open, settings, subject, rehearsal, public.batches, **shared)
        settings = dataclasses.replace(settings, public_texts=(public.origin,))
    batches: list[Mapping[str, Any]] = []
    if autoencoder is not None and settings.autoencoder is not None:
        public = subject.read_public(autoencoder.public, autoencoder.examples, settings.sequence_length)
        settings = dataclasses.replace(settings, public_texts=(public.origin,))
        batches = list(public.batches) * autoencoder.passes
    made = settings.open(subject.model, output_dir=Path(str(subject.config.output)) / RELEASES)
    try:
        if batches:
            made.train_autoencoder(batches)
    except BaseException:
        made.discard()
        raise
    return made


def _autoencoder_text(options: dict[str, Any]) -> _PublicStage | None:
    path = options.pop("public", None)
    return None if path is None else _PublicStage(public=str(path), examples=512)


def _rehearsal(options: Any) -> _PublicStage | None:
    if options is None:
        return None
    kinds = types_of(_PublicStage)
    if not isinstance(options, Mapping) or "public" not in options or not set(options) <= set(kinds):
        others = ", ".join(name for name in kinds if name != "public")
        raise ConfigError(f"rehearsal must be a mapping of public, a file, and of {others}; not {options!r}")
    given = {"examples": _ALL, **options, "public": str(options["public"])}
    return _PublicStage(**{name: convert_value(name, value, kinds) for name, value in given.items()})


_SCHEDULES: dict[str, Callable[[FinetuneConfig, int], ewft.NoiseSchedule]] = {
    "release_once": lambda config, size: ewft.release_once(_epsilon(config), config.delta),
    "dp_forward": lambda config, size: ewft.dp_forward(int(config.epochs), _epsilon(config), config.delta),
    "paper_epoch_weighted": lambda config, size: ewft.paper_epoch_weighted(
        size, config.batch_size, int(config.epochs), _epsilon(config), config.delta
    ),
}


def _epsilon(config: FinetuneConfig) -> float:
    return float(config.epsilon or 0)
