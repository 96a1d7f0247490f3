"""Settings and forms of methods that are no longer offered: each is refused, or replaced with a warning for one release."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: What to use, by "Class.setting", by "Class.setting=value" and by "package.name".
REMOVED_NAMES = {
    "RapFT.bounds": "allocation='optimal' uses the printed bounds",
    "RapFT.weights": "allocation='optimal' weighs both blocks alike",
    "RapFT.ranking": "each layer is ranked by itself",
    "RapFT.allocation=ellipsoid": "use allocation='optimal', which has the same noise",
    "Initialisation.kind": "p alone says how much of the distribution counts; 1.0 takes all of it (naive)",
    "Propagation.rule": "linear layers follow the alpha-beta rule, as in the paper's experiments",
    "rapft.PublicMoments": "use PublicGradients, which reads the public batches itself",
    "rapft.warm_up": "use a few ordinary steps on public data, or set map_after",
    "DPFrost.magnitude": "magnitudes are MGNA",
    "DPFrost.choose_by=values": "use choose_by='random', which costs no epsilon either",
    "DPFrost.axes_power": "scales of partitions did no better than DPSGD",
    "DPFrost.granularity": "use partitions, or DPSGD, which did better than single entries",
    "CTI.form=elastic": "use form='prior', which hides as much at the same accuracy",
    "SelectivePerturbation.cells": "'local' knows no partition",
    "SelectivePerturbation.mechanism=partition": "use 'local', which holds among all tokens",
    "SelectivePerturbation.mechanism=metric": "use 'local', or TextPrivatizer for a bound that grows with distance",
    "ewft.TrainedPrivately": "use public text to train the autoencoder",
    "ewft.epoch_weighted": "use release_once, which spends the same epsilon with less noise",
    "ewft.shaped": "use release_once, which spends the same epsilon with less noise",
    "ewft.uniform": "use dp_forward, which is the same noise",
    "ewft.paper_uniform": "use paper_epoch_weighted, or dp_forward for a guarantee",
    "audit.attribute_inference": "use any classifier, trained on the released rows",
    "audit.pooled": "use the mean of the rows over a text's tokens",
    "audit.repeated_release": "use inversion and nearest_tokens on the mean of the releases",
}
#: Settings of the last release that are replaced with a warning: by what, or None to leave them out.
SUBSTITUTES: dict[str, Any] = {
    **dict.fromkeys(
        "RapFT.bounds RapFT.weights RapFT.ranking Initialisation.kind Propagation.rule DPFrost.magnitude DPFrost.axes_power "
        "DPFrost.granularity SelectivePerturbation.cells".split()
    ),
    "CTI.form=elastic": "prior",
    "SelectivePerturbation.mechanism=partition": "local",
    "DPFrost.choose_by=values": "random",
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
        raise AttributeError(f"the package {package} has no attribute {name!r}" if key is None else sentence(key))

    return __getattr__
