"""Where a mask may come from: public examples, a noised map of private ones, or (as printed) private ones as they are."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import fastdp.distributed.pieces as pieces
from fastdp.methods.public import PublicText, describe_origin
from fastdp.methods.rapft.axes import second_moments
from fastdp.methods.rapft.relevance import Map, Propagator
from fastdp.private.plan import SideRelease
from fastdp.private.preparation import Findings, Preparation
from fastdp.validate import positive, rate

#: The releases of noised maps, by their name in the ledger.
RELEVANCE = "relevance"


class MapSource(ABC):
    """What a mask or axes are made from."""

    def side(self, count: int) -> tuple[SideRelease, ...]:
        """What ``count`` maps release besides training steps."""
        return ()

    def release(self, propagator: Propagator, preparation: Preparation) -> None:  # noqa: B027 (public sources release nothing)
        """Make one of these releases."""

    @abstractmethod
    def relevance(self, propagator: Propagator, findings: Findings) -> Map:
        """The size of each trained coordinate's relevance."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """For the card."""


@dataclass(frozen=True)
class PublicMap(MapSource):
    """Relevance averaged over public examples (equation 18); costs no privacy.

    Batches are mappings of the model's arguments, labels included, such as a collator makes; the card names their ``origin``.
    """

    batches: Sequence[Mapping[str, Any]] = field(repr=False)
    origin: PublicText | None = None

    def __post_init__(self) -> None:
        if len(self.batches) == 0:
            raise ValueError(f"{type(self).__name__} has no batches: give some public examples")

    def relevance(self, propagator: Propagator, findings: Findings) -> Map:
        total = propagator.total(self.batches[0])
        for batch in self.batches[1:]:
            for name, values in propagator.total(batch).items():
                total[name] += values
        return total

    def describe(self) -> dict[str, Any]:
        return {"kind": "public", "batches": len(self.batches), "text": describe_origin(self.origin)}


@dataclass(frozen=True)
class PublicGradients(PublicMap):
    """Sizes of public examples' gradients at the weights as they are, for axes that are made anew on the way.

    A good axis at the beginning of a run may soon be a bad one (docs/rapft.md). Costs no privacy: weights were released.
    Batches are best of one example each, since those are what is clipped. Axes are made of ``at_once`` of them each time.
    """

    at_once: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.at_once is not None and not 1 <= self.at_once <= len(self.batches):
            raise ValueError(f"at_once is {self.at_once}: it must lie between 1 and the {len(self.batches)} batches")

    def relevance(self, propagator: Propagator, findings: Findings) -> Map:
        """The sizes of the trained parameters' gradients. Raises ValueError for weights in pieces."""
        if any(pieces.is_dtensor(parameter) for parameter in findings.parameters.values()):
            raise ValueError("PublicGradients need whole weights: with weights in pieces use PublicMap")
        # By the step, so that a run that is taken up again looks at the same ones.
        drawn = random.Random(findings.step).sample(self.batches, self.at_once or len(self.batches))
        return second_moments(findings.model, drawn)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"kind": "public gradients", "at_once": self.at_once or len(self.batches)}


@dataclass(frozen=True)
class NoisyMap(MapSource):
    """Relevance of a Poisson sample of the private examples, released with noise of its own.

    Each example's map, one vector, is clipped to L2 norm c_R; the sum gets N(0, sigma_R^2 c_R^2) in every coordinate. Ranking
    follows the noise and is free. Noise after min-max would protect nothing: one example can move a value from 0 to 1.
    """

    #: sigma_R, q_R and c_R.
    noise_multiplier: float
    sample_rate: float
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        positive(noise_multiplier=self.noise_multiplier, max_norm=self.max_norm)
        rate(sample_rate=self.sample_rate)

    def side(self, count: int) -> tuple[SideRelease, ...]:
        return (SideRelease(RELEVANCE, self.noise_multiplier, self.sample_rate, count),)

    def release(self, propagator: Propagator, preparation: Preparation) -> None:
        preparation.release(RELEVANCE).total(propagator.examples, self.max_norm, propagator.parameters)

    def relevance(self, propagator: Propagator, findings: Findings) -> Map:
        return dict(findings.releases[0])

    def describe(self) -> dict[str, Any]:
        return {"kind": "noised", **vars(self)}


@dataclass(frozen=True)
class PrivateSubset(MapSource):
    """Relevance averaged over a sample of the private examples, without noise: what algorithm 1 does.

    The mask then depends on the data, and no epsilon holds; `RapFT` takes it in ``paper`` mode only.
    """

    sample_rate: float = 0.02

    def __post_init__(self) -> None:
        rate(sample_rate=self.sample_rate)

    def release(self, propagator: Propagator, preparation: Preparation) -> None:
        preparation.unprotected(self.sample_rate, propagator.examples)

    def relevance(self, propagator: Propagator, findings: Findings) -> Map:
        if not findings.releases[0]:
            raise ValueError("the sample for the relevance map is empty: raise its sample_rate")
        return dict(findings.releases[0])

    def describe(self) -> dict[str, Any]:
        return {"kind": "private, not noised", **vars(self)}
