"""Numbers checked by name, in one sentence: ``positive(max_grad_norm=value)``."""

from __future__ import annotations

import math


def at_least(low: float, **numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all are finite numbers of at least ``low``."""
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < low:
            raise ValueError(f"{name} must be a finite number of at least {low:g}, got {value!r}")


def positive(**numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all are finite numbers above 0."""
    at_least(0.0, **numbers)
    for name, value in numbers.items():
        if value == 0.0:
            raise ValueError(f"{name} must be greater than 0")
