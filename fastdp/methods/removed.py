"""Settings and forms of methods that are no longer offered, each with what replaces it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Sentences by "Class.setting", by "Class.setting=value" and by "package.name".
REPLACEMENTS = {
    "RapFT.bounds": "leave it out; allocation='optimal' uses the printed bounds",
    "RapFT.weights": "leave it out; allocation='optimal' weighs both blocks alike",
    "RapFT.magnitude": "leave it out; coordinates are ranked by their relevance",
    "RapFT.allocation=ellipsoid": "use allocation='optimal', which has the same noise",
    "RapFT.axes_power=None": "use axes_power=0.5 for LoRA, and DPSGD for all weights",
    "Initialisation.kind=top_k": "use 'naive' or 'top_p'",
    "Initialisation.kind=beam": "use 'naive' or 'top_p'",
    "rapft.PublicMoments": "use PublicGradients with map_every, which makes axes anew",
    "rapft.fitted_axes": "use rank_one with a power of 0.5",
    "rapft.gradient_moments": "use second_moments",
    "DPFrost.norm_order": "leave it out; magnitudes are L1 norms",
    "DPFrost.magnitude=MGN": "use magnitude='MGNA'",
    "ewft.epoch_weighted": "use release_once, which spends the same epsilon with less noise",
    "ewft.shaped": "use release_once, which spends the same epsilon with less noise",
    "ewft.uniform": "use dp_forward, which is the same noise",
    "ewft.paper_uniform": "use paper_epoch_weighted, or dp_forward for a guarantee",
}


def check_offered(name: str, value: object = ...) -> None:
    """Raise ValueError, with what to use, for a removed name or a removed value of a setting."""
    for key in (name, f"{name}={value}"):
        if key in REPLACEMENTS:
            raise ValueError(f"{key} was removed: {REPLACEMENTS[key]}")


def refuse_removed(kind: type[T]) -> type[T]:
    """Decorate a class of settings: its constructor refuses those that were removed."""
    construct: Any = kind.__init__
    names = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def __init__(self: T, *arguments: Any, **settings: Any) -> None:
        for name, value in {**dict(zip(names, arguments)), **settings}.items():
            check_offered(f"{kind.__name__}.{name}", value)
        construct(self, *arguments, **settings)

    kind.__init__ = __init__  # type: ignore[method-assign, assignment]
    return kind


def removed_from(package: str) -> Callable[[str], object]:
    """A module's ``__getattr__`` that says what replaces a removed name."""

    def __getattr__(name: str) -> object:
        key = f"{package}.{name}"
        replaced = f"{key} was removed: {REPLACEMENTS[key]}" if key in REPLACEMENTS else None
        raise AttributeError(replaced or f"module 'fastdp.methods.{package}' has no attribute {name!r}")

    return __getattr__
