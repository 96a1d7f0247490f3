"""The server's arithmetic: updates checked one at a time, added to one running sum, and released."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import fastdp.ops as ops
from fastdp.federated.wire import unpack_adapter
from fastdp.ops.stream import NoiseStream
from fastdp.untrusted import quote
from fastdp.validate import positive


class RefusedUpdate(ValueError):
    """An update that does not enter the aggregate; the message says why."""


@dataclass(frozen=True)
class UpdateBounds:
    """Largest norm of an update's difference from the global adapter, and largest number of examples that it may claim."""

    max_norm: float
    max_examples: int


class Aggregator:
    """Mean of the clients' adapters (equation 7 of the federated selective paper), one update in memory at a time.

    Keeps the global adapter, and one float64 vector of the sum of weighted differences from it, whatever the number of
    clients. A refused update leaves both as they were.

    Args:
        start: the global adapter that the round's clients were given.
        bounds: what is refused.
        weighted: weight each client by its number of examples instead of equally.
        clip: central DP: scale each difference to at most this L2 norm; needs equal weights.

    Attributes:
        accepted: number of updates in the sum.
    """

    def __init__(
        self, start: Mapping[str, Tensor], bounds: UpdateBounds, *, weighted: bool = False, clip: float | None = None
    ) -> None:
        if weighted and clip is not None:
            raise ValueError("central DP needs equal weights: a client's number of examples is unbounded and private")
        self.start = start
        self.bounds = bounds
        self.weighted = weighted
        self.clip = clip
        self.accepted = 0
        self._start = _flat(start)
        self._sum = torch.zeros_like(self._start)
        self._weight = 0.0

    def add(self, data: bytes, examples: object) -> float:
        """Check one update, which may be hostile, and add it; returns the norm of its difference from the global adapter.

        Args:
            data: the client's adapter, whole, as `pack_adapter` writes it.
            examples: the number of examples it claims to have trained on.

        Raises:
            RefusedUpdate: for other names, shapes, dtypes or sizes; a NaN or infinity; an impossible number of examples;
                a norm beyond the bound; whatever else keeps it from being read.
        """
        try:
            change, norm, count = self._read_update(data, examples)
        except RefusedUpdate:
            raise
        except Exception as error:
            # Hostile bytes may raise any error in a library, and one client must not end the run of the others.
            raise RefusedUpdate(f"it cannot be read: {type(error).__name__}") from error
        weight = float(count) if self.weighted else 1.0
        if self.clip is not None and norm > self.clip:
            # A little below the bound, so that rounding of the products cannot pass it.
            change *= self.clip / norm * (1 - 1e-12)
        self._sum.add_(change, alpha=weight)
        self._weight += weight
        self.accepted += 1
        return norm

    def _read_update(self, data: bytes, examples: object) -> tuple[Tensor, float, int]:
        """The update's difference from the global adapter, the norm of that, and its number of examples."""
        if not isinstance(examples, int) or isinstance(examples, bool):
            raise RefusedUpdate(f"its number of examples is {quote(examples)}, which is no whole number")
        if not 1 <= examples <= self.bounds.max_examples:
            raise RefusedUpdate(f"its number of examples is {examples}, outside 1 to {self.bounds.max_examples}")
        try:
            change = _flat(unpack_adapter(data, self.start)) - self._start
        except ValueError as error:
            raise RefusedUpdate(str(error)) from None
        if not bool(torch.isfinite(change).all()):
            raise RefusedUpdate("it holds a NaN or an infinity")
        norm = float(change.norm())
        if norm > self.bounds.max_norm:
            raise RefusedUpdate(f"its change has norm {norm:.4g}, beyond the bound {self.bounds.max_norm:g}")
        return change, norm, examples

    def mean(self) -> dict[str, Tensor]:
        """The new global adapter: the weighted mean of those accepted. Raises ValueError if there are none."""
        if not self.accepted:
            raise ValueError("no update was accepted, so there is no mean")
        return self._state(self._start + self._sum / self._weight)

    def noisy_mean(self, noise_multiplier: float, expected: float, stream: NoiseStream) -> dict[str, Tensor]:
        """The new global adapter of central DP: global + (sum of clipped changes + noise) / expected clients.

        One Gaussian release with noise of std ``noise_multiplier * clip`` on a sum that one client moves by at most
        ``clip``. The divisor does not depend on who took part. Record the release in the ledger first.

        Raises:
            ValueError: without a clip, or for numbers that are not positive.
        """
        if self.clip is None:
            raise ValueError("noise was asked for, but updates were not clipped")
        positive(noise_multiplier=noise_multiplier, expected=expected)
        total = self._sum.float()
        ops.add_noise_(total, noise_multiplier * self.clip, stream, secure_rounding=True)
        return self._state(self._start + total.double() / expected)

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([tensor.numel() for tensor in self.start.values()])
        return {name: part.view(own.shape).to(own.dtype) for part, (name, own) in zip(parts, self.start.items())}


def _flat(state: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in state.values()])
