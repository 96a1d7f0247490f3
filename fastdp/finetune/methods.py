"""The method of a run, made from the config's `method` and `method_options`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fastdp
from fastdp.accounting import Card, Claim
from fastdp.accounting.claim import read_claim
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.methods.perturbation import Releases
from fastdp.methods.public import PublicText
from fastdp.methods.rapft import Initialisation, NoisyMap, PrivateSubset, Propagation, PublicGradients, PublicMap
from fastdp.methods.removed import removed_key
from fastdp.private.method import Method
from fastdp.private.run import Private
from fastdp.settings import suggest_name


@dataclasses.dataclass(frozen=True)
class Public:
    """A file of public examples that the gate let in: batches on the model's device, and what the card says of it."""

    batches: Sequence[Mapping[str, Any]]
    origin: PublicText


#: Reads a file of public examples, of which at most so many are used, and pads them to so many tokens, if given.
ReadPublic = Callable[..., Public]

#: Methods whose privacy does not come from the training steps.
LOCAL = ("ewft", "sap", "selective")
_SOURCES = {"noisy": NoisyMap, "private": PrivateSubset}
_NESTED = {"propagation": Propagation, "initialisation": Initialisation}
_PUBLIC_EXAMPLES = 64


def choose_method(config: FinetuneConfig, read_public: ReadPublic) -> Method:
    """The method that a config names; without privacy (epsilon inf) there is none, whatever it names.

    ``method_options`` are the arguments of `fastdp.DPSGD`, `fastdp.DPZO`, `fastdp.RapFT` or `fastdp.DPFrost`.
    Rap-FT's ``source`` is a mapping: ``{kind: noisy, noise_multiplier: 2, sample_rate: .02}``,
    ``{kind: public, data: PATH, examples: 64}``, the same of ``kind: gradients`` for axes that follow the gradients of single
    examples, ``at_once`` so many of them, or in ``paper`` mode ``{kind: private}``.

    Raises:
        ConfigError: for an option that the method does not have, or a value that it refuses.
    """
    if config.method in LOCAL or math.isinf(float(config.epsilon or 0)):
        return fastdp.NonPrivate()
    options = dict(config.method_options or {})
    if config.method == "dpzo":
        return make_options(fastdp.DPZO, options, "method_options")
    kind = {"dpsgd": fastdp.DPSGD, "rapft": fastdp.RapFT, "frost": fastdp.DPFrost}[config.method]
    if config.method == "rapft":
        for name, nested in _NESTED.items():
            if name in options:
                options[name] = make_options(nested, _mapping(options[name], name), name)
        if "source" in options:
            options["source"] = _source(_mapping(options["source"], "source"), read_public)
        elif options.get("mode") != "paper" and options.keys() <= {
            own.name for own in dataclasses.fields(fastdp.RapFT)
        }:
            raise ConfigError(
                "rapft has no source of its map: give method_options such as {source: {kind: public, data: FILE}}, of public "
                "examples"
            )
    return make_options(kind, {"max_grad_norm": config.max_grad_norm} | options, "method_options")


class Central(Releases):
    """A run whose privacy is the engine's: what it spent is known once the engine has the model.

    Attributes:
        private: the run, from then on.
    """

    once_an_epoch = False
    private: Private

    @property
    def noise_multiplier(self) -> float:  # type: ignore[override]
        """Of a step."""
        return self.private.noise_multiplier

    def follow(self, run: Private) -> None:
        """This is the run that is asked from here on."""
        self.private = run

    def epsilon(self) -> float:
        """Of the steps so far."""
        return self.private.epsilon()

    def flaws(self) -> list[str]:
        return list(self.private.method.flaws())

    def claim(self) -> Claim:
        """Of the steps so far."""
        return read_claim(self.card())

    def card(self) -> Card:
        return self.private.card()


def check_method(config: FinetuneConfig) -> None:
    """Refuse options of a central method before anything is read or loaded, as `choose_method` would after."""
    with warnings.catch_warnings():
        # They come once, when the method is made.
        warnings.simplefilter("ignore")
        choose_method(config, lambda path, count: Public([{}] * count, PublicText(path, "", 0, 0)))


def _source(options: dict[str, Any], read_public: ReadPublic) -> Any:
    kind = options.pop("kind", None)
    if kind in ("public", "gradients"):
        if "data" not in options:
            raise ConfigError(f"source of kind {kind} needs data: the file with the public examples")
        path, count = str(options.pop("data")), options.pop("examples", _PUBLIC_EXAMPLES)
        turns = {"at_once": options.pop("at_once")} if kind == "gradients" and "at_once" in options else {}
        for name, value in {"examples": count, **turns}.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} of source must be a whole number above 0, not {value!r}")
        if options:
            known = "data, examples and at_once" if kind == "gradients" else "data and examples"
            raise ConfigError(f"source of kind {kind} has {known}, not {', '.join(options)}")
        public = read_public(path, count)
        if kind == "public":
            return PublicMap(public.batches, public.origin)
        singles = [one for batch in public.batches for one in _singly(batch)]
        return make_options(PublicGradients, {"batches": singles, "origin": public.origin, **turns}, "source")
    if kind not in _SOURCES:
        raise ConfigError(f"source has kind {kind!r}: choose one of public, gradients, {', '.join(_SOURCES)}")
    return make_options(_SOURCES[kind], options, "source")


def _singly(batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of a batch, each a batch."""
    rows = min((len(tensor) for tensor in batch.values()), default=1)
    return [{name: tensor[row : row + 1] for name, tensor in batch.items()} for row in range(rows)]


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of settings, not {value!r}")
    return dict(value)


def make_options(kind: Any, options: Mapping[str, Any], where: str) -> Any:
    """An object of these settings. Raises ConfigError, with their place, for a setting that it lacks or refuses."""
    check_names(kind, options, where)
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None


def check_names(
    kind: Any, options: Mapping[str, Any], where: str = "method_options", known: Sequence[str] = ()
) -> None:
    """Raise ConfigError for the first option that a class lacks, or that is not ``known``; what was removed it tells itself."""
    known = known or [field.name for field in dataclasses.fields(kind) if field.init]
    for name, value in options.items():
        if name not in known and removed_key(f"{kind.__name__}.{name}", value) is None:
            raise ConfigError(
                f"{where}: {kind.__name__} has no option {name!r}{suggest_name(str(name), known, 'there are')}"
            )
