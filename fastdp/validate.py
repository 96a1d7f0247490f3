"""What a user gave, checked by name, in one sentence: ``positive(max_grad_norm=value)``."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def at_least(low: float, **numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all are finite numbers of at least ``low``."""
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < low:
            raise ValueError(f"{name} must be a finite number of at least {low:g}, got {value!r}")


def positive(**numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all are finite numbers above 0."""
    _check(lambda value: 0 < value < math.inf, "be a finite number above 0", numbers)


def fraction(**numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all lie between 0 and 1, both excluded."""
    _check(lambda value: 0 < value < 1, "lie between 0 and 1", numbers)


def rate(**numbers: float) -> None:
    """Raise ValueError, naming the first that is not, unless all are probabilities above 0."""
    _check(lambda value: 0 < value <= 1, "lie in (0, 1]", numbers)


def number(**values: Any) -> None:
    """Raise ValueError, naming the first that is not, unless all are numbers or None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise ValueError(f"{name} is {value!r}: give a number")


def integer(low: float = -math.inf, **values: Any) -> None:
    """Raise ValueError, naming the first that is not, unless all are whole numbers of at least ``low`` or None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < low):
            least = f" of at least {low}" if math.isfinite(low) else ""
            raise ValueError(f"{name} is {value!r}: give a whole number{least}")


def instance(kind: Any, how: str, **values: object) -> None:
    """Raise TypeError, naming the first that is not, unless all are instances of ``kind``; ``how`` says what to give."""
    for name, value in values.items():
        if not isinstance(value, kind):
            kind_given = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
            raise TypeError(f"{name} is {'None' if value is None else kind_given}: give {how}")


def _check(holds: Callable[[float], bool], what: str, numbers: dict[str, float]) -> None:
    for name, value in numbers.items():
        known = isinstance(value, Real) and not isinstance(value, bool)
        if not (known and holds(value)):
            raise ValueError(f"{name} is {value!r}: {f'it must {what}' if known else 'give a number'}")


def one_of(choices: Sequence[str], **values: object) -> None:
    """Raise ValueError, naming the first that is not, unless all are among the choices."""
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name} is {value!r}: choose {' or '.join(map(repr, choices))}")


def usable_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one. Raises ValueError for one that holds no tensor here."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):
        known = "cpu" + "".join(f", cuda:{index}" for index in range(torch.cuda.device_count()))
        raise ValueError(
            f"device {name} cannot be used, and torch has {known} here: name one of these, or auto"
        ) from None
    return device


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of ``host:port``; an IPv6 host stands in brackets. Raises ValueError for another form."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is no address: write host:port")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's own address, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def first_line(error: Exception) -> str:
    """What an error of the user's code or of a library says, for a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
