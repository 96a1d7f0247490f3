"""What a user gave, checked by name, in one sentence: ``positive(max_grad_norm=value)``."""

from __future__ import annotations

import ipaddress
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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


def usable_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one. Raises ValueError for one that holds no tensor here."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name} cannot be used: {str(error).splitlines()[0]}") from None
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
