"""What was released, as `dp_accounting` events: builders, the event of n releases, the flat form accountants read."""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex

from fastdp import validate
from fastdp.accounting.event_types import DpEvent, dp_event

Sampling = Literal["poisson", "shuffled"]
#: (first release, factor of the noise multiplier from there on), in order; the first entry begins at release 0.
NoiseFactors = tuple[tuple[int, float], ...]
#: The same noise multiplier at every release.
CONSTANT: NoiseFactors = ((0, 1.0),)
#: Most kinds of sampled release that an accountant tells apart, since each takes time of its own.
MOST_KINDS = 256


def as_count(value: SupportsIndex, what: str) -> int:
    """A Python int >= 0 from any integer type; raises ValueError otherwise."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{what} is {value!r}: it must be a whole number") from None
    if count < 0:
        raise ValueError(f"{what} is {count}: it must be 0 or more")
    return count


def _as_multiplier(value: float) -> float:
    validate.number(noise_multiplier=value)
    multiplier = float(value)
    validate.at_least(0.0, noise_multiplier=multiplier)
    return multiplier


def squared_ratio(multiplier: float) -> float:
    """1/z^2, inf where it overflows."""
    return (1 / multiplier) * (1 / multiplier) if multiplier > 1e-150 else math.inf


def gaussian(noise_multiplier: float) -> DpEvent:
    """One Gaussian release over all units.

    Args:
        noise_multiplier: noise std over L2 sensitivity; 0 is no privacy. Raises ValueError below 0.

    >>> from fastdp.accounting import compose, epsilon, gaussian
    >>> round(epsilon(gaussian(1.0), 1e-5), 3) == round(epsilon(compose(*4 * [gaussian(2.0)]), 1e-5), 3)
    True
    """
    return dp_event.GaussianDpEvent(_as_multiplier(noise_multiplier))


def poisson_gaussian(noise_multiplier: float, sample_rate: float) -> DpEvent:
    """One Gaussian release of a sample that each unit joins independently.

    Args:
        noise_multiplier: noise std over L2 sensitivity; 0 is no privacy. Raises ValueError below 0.
        sample_rate: the probability with which a unit joins, in (0, 1].

    >>> from fastdp.accounting import epsilon, gaussian, poisson_gaussian
    >>> epsilon(poisson_gaussian(1.0, 0.1), 1e-5) < epsilon(gaussian(1.0), 1e-5)
    True
    """
    validate.rate(sample_rate=sample_rate)
    return dp_event.PoissonSampledDpEvent(float(sample_rate), gaussian(noise_multiplier))


def compose(*events: DpEvent) -> DpEvent:
    """Several releases of the same data set, each of which may depend on the earlier ones. Raises nothing.

    Args:
        events: any number of them; none is an event that costs nothing.

    >>> from fastdp.accounting import compose, dpsgd, epsilon, gaussian
    >>> epsilon(compose(), 1e-5)
    0.0
    >>> epsilon(compose(dpsgd(1.0, 0.1, 10), gaussian(4.0)), 1e-5) > epsilon(dpsgd(1.0, 0.1, 10), 1e-5)
    True
    """
    kept = [event for event in events if not isinstance(event, dp_event.NoOpDpEvent)]
    if not kept:
        return dp_event.NoOpDpEvent()
    return kept[0] if len(kept) == 1 else dp_event.ComposedDpEvent(kept)


@dataclass(frozen=True)
class EventModel:
    """The event of n releases of one kind, for any n.

    Attributes:
        one: event of a single use of every unit.
        releases_per_use: how many consecutive releases together touch each unit at most once. 1 with Poisson
            sampling. With shuffled batches one epoch of ``steps_per_epoch`` releases is one use: the batches are
            disjoint, so an epoch is one Gaussian mechanism of the same multiplier. A begun epoch counts whole.
        later: (first use, event) in order: from that use on, the event replaces the one before.
    """

    one: DpEvent
    releases_per_use: int = 1
    later: tuple[tuple[int, DpEvent], ...] = ()

    def __post_init__(self) -> None:
        validate.integer(1, releases_per_use=self.releases_per_use)
        starts = [0, *(as_count(start, "the first use of an event") for start, _ in self.later)]
        if any(later <= earlier for earlier, later in zip(starts, starts[1:])):
            raise ValueError("the events of later uses must stand in order, each from another use on")

    def uses(self, releases: int) -> int:
        """How often a unit may have been used in ``releases`` releases: the ceiling of their quotient."""
        return -(-as_count(releases, "number of releases") // self.releases_per_use)

    def round_up(self, releases: int) -> int:
        """``releases`` with a begun epoch counted whole: what is spent once the next release starts a new pass."""
        return self.uses(releases) * self.releases_per_use

    def event(self, releases: int) -> DpEvent:
        """Event of ``releases`` releases; none at all is `NoOpDpEvent`."""
        uses, found = self.uses(releases), []
        ends = [start for start, _ in self.later] + [uses]
        for (start, event), end in zip([(0, self.one), *self.later], ends):
            count = min(end, uses) - start
            if count > 0 and not isinstance(event, dp_event.NoOpDpEvent):
                found.append(event if count == 1 else dp_event.SelfComposedDpEvent(event, count))
        return compose(*found)


def dpsgd_model(
    noise_multiplier: float,
    sample_rate: float,
    sampling: Sampling = "poisson",
    steps_per_epoch: int | None = None,
    factors: NoiseFactors = CONSTANT,
) -> EventModel:
    """Event of n steps of DP-SGD.

    Args:
        noise_multiplier: noise std over sensitivity of one step; 0 is no privacy.
        factors: factors of the multiplier, as `NoiseFactors`. A shuffled epoch counts at its least noise, since nobody knows
            in which of its steps a unit is used.
        sample_rate: expected batch size over the number of units, in (0, 1].
        sampling: ``poisson`` is amplified by sampling; ``shuffled`` is accounted without amplification.
        steps_per_epoch: releases in one pass over the shuffled units. Raises ValueError for ``shuffled`` without it.

    >>> from fastdp.accounting import dpsgd, dpsgd_model
    >>> dpsgd_model(1.0, 0.1).event(20) == dpsgd(1.0, 0.1, 20)
    True
    """
    validate.number(noise_multiplier=noise_multiplier)
    if sampling == "poisson":
        one, *later = (
            (start, poisson_gaussian(noise_multiplier * factor, sample_rate)) for start, factor in _by_use(factors, 1)
        )
        return EventModel(one[1], 1, tuple(later))
    if sampling != "shuffled":
        raise ValueError(f"sampling is {sampling!r}: choose 'poisson' or 'shuffled'")
    validate.rate(sample_rate=sample_rate)
    if steps_per_epoch is None:
        raise ValueError("shuffled sampling is accounted by epochs: give steps_per_epoch")
    validate.integer(1, steps_per_epoch=steps_per_epoch)
    uses = _by_use(factors, operator.index(steps_per_epoch))
    one, *later = ((start, gaussian(noise_multiplier * factor)) for start, factor in uses)
    return EventModel(one[1], operator.index(steps_per_epoch), tuple(later))


def _by_use(factors: Sequence[tuple[int, float]], steps: int) -> NoiseFactors:
    """(first use, least factor within it) wherever that factor changes; a use is ``steps`` consecutive steps."""
    starts, levels = [start for start, _ in factors], [factor for _, factor in factors]
    if starts[:1] != [0] or any(later <= earlier for earlier, later in zip(starts, starts[1:])):
        raise ValueError("factors of noise must begin at release 0 and stand in order")
    found: list[tuple[int, float]] = []
    for use in sorted({start // steps for start in starts} | {-(-start // steps) for start in starts}):
        # The levels that hold somewhere from this use's first step to its last.
        first, stop = bisect.bisect_right(starts, use * steps) - 1, bisect.bisect_left(starts, (use + 1) * steps)
        least = min(levels[first:stop])
        if not found or found[-1][1] != least:
            found.append((use, least))
    return tuple(found)


def dpsgd(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    sampling: Sampling = "poisson",
    steps_per_epoch: int | None = None,
) -> DpEvent:
    """Event of DP-SGD.

    Args:
        noise_multiplier: noise std over sensitivity of one step; 0 is no privacy.
        sample_rate: expected batch size over the number of units, in (0, 1].
        steps: how many, noisy sums each.
        sampling, steps_per_epoch: as for `dpsgd_model`. Raises ValueError as that.

    >>> from fastdp.accounting import dpsgd
    >>> dpsgd(noise_multiplier=1.0, sample_rate=0.1, steps=20).event
    PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=1.0))
    """
    return dpsgd_model(noise_multiplier, sample_rate, sampling, steps_per_epoch).event(steps)


@dataclass(frozen=True)
class ChosenDpEvent(DpEvent):
    """The best of a secret number of trials, drawn from a truncated negative binomial distribution; see `chosen`."""

    alternatives: tuple[DpEvent, ...]
    shape: float
    stop: float


def chosen(alternatives: Sequence[DpEvent], shape: float, stop: float) -> DpEvent:
    """Event of random stopping (Papernot and Steinke 2022): trials until a secret number is reached, the best one released.

    Args:
        alternatives: events of one trial, of which a unit takes part in one: its training, or the score that judges it.
        shape: eta, above -1; 0 is the logarithmic distribution of the number of trials, 1 the geometric one.
        stop: gamma, in (0, 1); see `fastdp.accounting.renyi.stop_for`.

    Raises ValueError for another distribution, and where no trial is given.

    >>> from fastdp.accounting import chosen, dpsgd, epsilon
    >>> trial = dpsgd(4.0, 0.1, 20)
    >>> epsilon(trial, 1e-5) < epsilon(chosen([trial], shape=0.0, stop=0.1), 1e-5)
    True
    """
    if not alternatives:
        raise ValueError("a choice among trials needs the event of a trial")
    if not -1 < shape < math.inf or not 0 < stop < 1:
        raise ValueError(f"no number of trials has shape {shape} and chance of stopping {stop}")
    return ChosenDpEvent(tuple(alternatives), float(shape), float(stop))


@dataclass(frozen=True)
class Choice:
    """One `ChosenDpEvent`, its alternatives flat."""

    alternatives: tuple[Flat, ...]
    shape: float
    stop: float


@dataclass(frozen=True)
class Flat:
    """An event as accountants need it: equal releases merged."""

    #: (sample rate, noise multiplier, count) of the Poisson-sampled Gaussian releases, sorted.
    sampled: tuple[tuple[float, float, int], ...]
    #: Sum of 1/z^2 over the Gaussian releases without sampling; they are one release of 1/sqrt of it.
    mu_squared: float
    #: False if anything was released without noise.
    private: bool = True
    #: Choices among trials, for which only Renyi bounds are known.
    choices: tuple[Choice, ...] = ()

    @property
    def empty(self) -> bool:
        """True if nothing was released."""
        return self.private and not self.sampled and self.mu_squared == 0 and not self.choices

    @property
    def unamplified_mu_squared(self) -> float:
        """mu^2 of the same releases without sampling, which dominates them."""
        return self.mu_squared + sum(count * squared_ratio(z) for _, z, count in self.sampled)

    def merged(self, most: int) -> Flat:
        """The event with at most so many kinds of sampled release, at no lower cost: neighbours count as the dearest of them."""
        # Sorted by rate, so that the last of a group has the highest.
        size = max(1, -(-len(self.sampled) // most))
        groups = [self.sampled[at : at + size] for at in range(0, len(self.sampled), size)]
        dearest = ((group[-1][0], min(z for _, z, _ in group), sum(n for *_, n in group)) for group in groups)
        return replace(self, sampled=tuple(dearest))


#: Most choices in one event: each is kept as an entry of its own, and nobody tunes oftener on one data set.
_MOST_CHOICES = 1000


def flatten(event: DpEvent) -> Flat:
    """Merge the equal releases inside ``event``. Raises ValueError for a kind of event no accountant here supports."""
    counter = _ReleaseCounter()
    counter.add(event, 1)
    counts = counter.counts.items()
    sampled = sorted((rate, z, count) for (rate, z), count in counts if rate < 1)
    mu_squared = sum(count * squared_ratio(z) for (rate, z), count in counts if rate == 1)
    return Flat(tuple(sampled), mu_squared, counter.private, tuple(counter.choices))


class _ReleaseCounter:
    """Count the releases of events."""

    def __init__(self) -> None:
        #: By sample rate, which is 1 without sampling, and noise multiplier.
        self.counts: Counter[tuple[float, float]] = Counter()
        #: Those among trials, each as often as it is made.
        self.choices: list[Choice] = []
        #: False once anything was released without noise.
        self.private = True
        self._trials = 0

    def add(self, event: Any, count: int) -> None:
        """Count ``count`` releases of an event."""
        if count == 0 or isinstance(event, dp_event.NoOpDpEvent):
            return
        if isinstance(event, dp_event.NonPrivateDpEvent):
            self.private = False
        elif isinstance(event, dp_event.SelfComposedDpEvent):
            self.add(event.event, count * as_count(event.count, "count"))
        elif isinstance(event, dp_event.ComposedDpEvent):
            for part in event.events:
                self.add(part, count)
        elif isinstance(event, dp_event.GaussianDpEvent):
            self._add_gaussian(1.0, _as_multiplier(event.noise_multiplier), count)
        elif isinstance(event, dp_event.PoissonSampledDpEvent):
            self._add_sampled(float(event.sampling_probability), flatten(event.event), count)
        elif isinstance(event, ChosenDpEvent):
            parts = tuple(flatten(part) for part in event.alternatives)
            self._add_choice(Choice(parts, event.shape, event.stop), count)
        else:
            raise ValueError(f"{type(event).__name__} is not an event this package can account for")

    def _add_gaussian(self, rate: float, multiplier: float, count: int) -> None:
        if multiplier > 0:
            self.counts[rate, multiplier] += count
        else:
            self.private = False

    def _add_sampled(self, rate: float, inner: Flat, count: int) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"sample rate is {rate}: it must lie in (0, 1]")
        if inner.sampled or inner.choices:
            raise ValueError(
                "a Poisson sample of a Poisson sample or of a choice is not an event this package can account for"
            )
        if rate > 0 and not inner.empty:
            # Gaussian releases of one and the same sample are one Gaussian release of it.
            self._add_gaussian(rate, 1 / math.sqrt(inner.mu_squared) if inner.private else 0.0, count)

    def _add_choice(self, choice: Choice, count: int) -> None:
        if any(part.choices for part in choice.alternatives):
            raise ValueError("a choice among choices is not an event this package can account for")
        if not all(part.private for part in choice.alternatives):
            self.private = False
        elif max(len(self.choices) + count, self._trials + len(choice.alternatives)) > _MOST_CHOICES:
            raise ValueError(
                f"more than {_MOST_CHOICES} choices among trials, or alternatives, are not an event this package can account for"
            )
        else:
            self._trials += len(choice.alternatives)
            self.choices += [choice] * count
