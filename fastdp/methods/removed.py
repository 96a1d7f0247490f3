"""Settings and forms of methods that are no longer offered: each is refused, or replaced with a warning for one release."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_NO_CORRECTION = "leave it out, since AdamW without it trained better at every learning rate"
_NO_AVERAGE = "leave it out, or average released checkpoints yourself"
PRIVATIZERS = ("SAPPerturbation", "TextPrivatizer", "PrivateEmbedding")
#: What to use, by "Class.setting", by "Class.setting=value" and by "package.name".
REMOVED_NAMES = {
    "RapFT.bounds": "allocation='optimal' uses the printed bounds",
    "RapFT.weights": "allocation='optimal' weighs both blocks alike",
    "RapFT.magnitude": "coordinates are ranked by their relevance",
    "RapFT.allocation=ellipsoid": "use allocation='optimal', which has the same noise",
    "RapFT.axes_power=None": "use 0.5 for LoRA, and DPSGD for all weights",
    "Initialisation.kind=top_k": "use 'naive' or 'top_p'",
    "Initialisation.kind=beam": "use 'naive' or 'top_p'",
    "rapft.PublicMoments": "use PublicGradients with map_every, which makes axes anew",
    "rapft.fitted_axes": "use rank_one with a power of 0.5",
    "rapft.gradient_moments": "use second_moments",
    "DPFrost.norm_order": "magnitudes are L1 norms",
    "DPFrost.magnitude=MGN": "use magnitude='MGNA'",
    "DPFrost.axes_power": "use DPSGD, which trains every partition and did as well",
    "DPFrost.choose_by=values": "use choose_by='random', which costs no epsilon either",
    "DPFrost.granularity": "use partitions, or DPSGD, which did better than single entries",
    **{f"{method}.bias_correction": _NO_CORRECTION for method in ("DPSGD", "RapFT", "DPFrost")},
    **{f"{method}.weight_averaging": _NO_AVERAGE for method in ("DPSGD", "RapFT", "DPFrost", "NonPrivate")},
    "CTI.form=elastic": "use form='prior', which hides as much at the same accuracy",
    **{f"{kind}.special": "tokens of a role stay" for kind in PRIVATIZERS},
    "SelectivePerturbation.cells": "'local' knows no partition",
    "SelectivePerturbation.mechanism=partition": "use 'local', which holds among all tokens",
    "SelectivePerturbation.mechanism=metric": "use 'local', or TextPrivatizer for a bound that grows with distance",
    "selective.balanced_partition": "use the mechanism 'local', which holds among all tokens",
    "ewft.TrainedPrivately": "use public text to train the autoencoder",
    "ewft.epoch_weighted": "use release_once, which spends the same epsilon with less noise",
    "ewft.shaped": "use release_once, which spends the same epsilon with less noise",
    "ewft.uniform": "use dp_forward, which is the same noise",
    "ewft.paper_uniform": "use paper_epoch_weighted, or dp_forward for a guarantee",
    "ewft.privunit": "use codebook, with about sixteen codes where nothing public has labels",
    "ewft.PrivUnit": "use Codebook, with about sixteen codes where nothing public has labels",
}
#: Settings of the last release that are replaced with a warning: by what, or None to leave them out.
SUBSTITUTES: dict[str, Any] = {
    "RapFT.bounds": None,
    "RapFT.weights": None,
    "RapFT.magnitude": None,
    "RapFT.axes_power=None": 0.5,
    "CTI.form=elastic": "prior",
    **{f"{kind}.special": None for kind in PRIVATIZERS},
    "SelectivePerturbation.cells": None,
    "SelectivePerturbation.mechanism=partition": "local",
    "DPFrost.norm_order": None,
    "DPFrost.magnitude=MGN": "MGNA",
    "DPFrost.axes_power": None,
    "DPFrost.choose_by=values": "random",
    "DPFrost.granularity": None,
}


def removed_key(name: str, value: object = ...) -> str | None:
    """The entry of `REMOVED_NAMES` for a name, or for this value of a setting; None for what is offered."""
    return next((key for key in (name, f"{name}={value}") if key in REMOVED_NAMES), None)


def sentence(key: str) -> str:
    """What was removed, and what to use."""
    return f"{key} was removed: {REMOVED_NAMES[key]}"


def replace_removed(kind: type[T]) -> type[T]:
    """Decorate a class of settings: its constructor refuses those that were removed, or replaces them with a warning."""
    construct: Any = kind.__init__
    names = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def __init__(self: T, *arguments: Any, **settings: Any) -> None:
        for name, value in (*zip(names, arguments), *settings.items()):
            key = removed_key(f"{kind.__name__}.{name}", value)
            if key is None:
                continue
            if key not in SUBSTITUTES or name not in settings:
                raise ValueError(sentence(key))
            warnings.warn(sentence(key), FutureWarning, stacklevel=2)
            if SUBSTITUTES[key] is None:
                settings = {other: given for other, given in settings.items() if other != name}
            else:
                settings = {**settings, name: SUBSTITUTES[key]}
        construct(self, *arguments, **settings)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


def removed_from(package: str) -> Callable[[str], object]:
    """A module's ``__getattr__`` that says what replaces a removed name."""

    def __getattr__(name: str) -> object:
        key = removed_key(f"{package}.{name}")
        raise AttributeError(
            f"module 'fastdp.methods.{package}' has no attribute {name!r}" if key is None else sentence(key)
        )

    return __getattr__
