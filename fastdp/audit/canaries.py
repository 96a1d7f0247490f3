"""What both kinds of canaries share: their coins, their place in a private run, and the verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fastdp.audit.guessing import SHARES, AuditResult, conclude
from fastdp.engine.policy import Policy, Unclipped
from fastdp.ops.stream import NoiseStream
from fastdp.private.release import Update

if TYPE_CHECKING:
    from fastdp.private.run import Private

#: The only kind of release in which canaries take part.
_STEP = "step"


class Canaries(ABC):
    """Canaries in one private run, each included by a fair coin of its own.

    Attach to a run before its first step, train as ever, then ask for `result`. The weights of an audited run have been
    trained on canaries: they are for the audit, not for use.

    Args:
        private: what `fastdp.make_private` returned, before its first step.
        count: number of canaries, at least 2.
        unsafe_seed: makes coins and directions reproducible; for tests.

    Raises:
        ValueError: fewer than 2 canaries, a run that has begun, or one that makes no claim.
    """

    def __init__(self, private: Private, count: int, *, unsafe_seed: int | None = None):
        if count < 2:
            raise ValueError(f"{count} canaries cannot be ranked: use at least 2, and hundreds to show anything")
        if not private.ledger.untouched:
            raise ValueError("canaries belong into a run before its first step; make the run private anew")
        if isinstance(private._engine.accumulator.policy, Unclipped):
            raise ValueError("the non-private method claims nothing, so there is nothing to audit")
        if isinstance(private._release, ObservedRelease):
            raise ValueError("this run is being audited already; detach its canaries first")
        self.private = private
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        #: The coins: whether each canary is in the data, bool [m].
        self.included = self.stream.bernoulli(count, 0.5)
        self.releases = 0
        self._inner = private._release
        private._release = ObservedRelease(self._inner, self)  # type: ignore[assignment]

    def __len__(self) -> int:
        return self.included.shape[0]

    @property
    def expected_batch_size(self) -> float:
        """What the noisy sum was divided by."""
        return self._inner.expected_batch_size

    @abstractmethod
    def before_release(self, sums: dict[str, torch.Tensor], policy: Policy) -> None:
        """Called with the clipped sums of a logical batch, before its noise."""

    @abstractmethod
    def after_release(self, policy: Policy) -> None:
        """Called when `.grad` of each trained parameter holds what was released."""

    @abstractmethod
    def scores(self) -> torch.Tensor:
        """One score a canary, float [m]: the higher, the more it looks included."""

    def result(
        self, confidence: float = 0.95, delta: float | None = None, shares: Sequence[float] = SHARES
    ) -> AuditResult:
        """The lower bound on epsilon, beside what the run claims to have spent so far.

        Args:
            confidence: 1 - confidence bounds the probability of a false alarm.
            delta: at which epsilon is stated; default the run's target.
            shares: as in `fastdp.audit.conclude`; choose them before looking at any score.

        Raises:
            ValueError: without a step or a delta, or for scores that are not finite.
        """
        delta = self.private.target_delta if delta is None else delta
        if delta is None:
            raise ValueError("no target_delta was given to the run; pass delta")
        if self.private.ledger.untouched:
            raise ValueError("nothing was released yet: train before asking for the result")
        return conclude(
            self.scores(),
            self.included,
            claimed=self.private.epsilon(delta),
            delta=delta,
            confidence=confidence,
            shares=shares,
        )

    def detach(self) -> None:
        """Take the canaries out of the run; scores and coins stay."""
        self.private._release = self._inner


class ObservedRelease:
    """A run's release with canaries before it and an observer after it."""

    def __init__(self, inner: Any, canaries: Canaries):
        self._inner = inner
        self._canaries = canaries

    def __call__(
        self, sums: dict[str, torch.Tensor], policy: Policy, *, kind: str = _STEP, update: Update | None = None
    ) -> None:
        """Release as the inner one does; other kinds than training steps pass unobserved.

        An optimizer's ``update`` is left out, for what it applies is not seen as a gradient.
        """
        if kind != _STEP:
            self._inner(sums, policy, kind=kind)
            return
        self._canaries.before_release(sums, policy)
        self._inner(sums, policy, kind=kind)
        self._canaries.after_release(policy)
        self._canaries.releases += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def noise_std(policy: Policy, name: str, device: torch.device) -> torch.Tensor:
    """The noise that a policy states for a parameter: a scalar, or of the parameter's shape where it is masked.

    Without noise it is 1, so that scores divided by it stay finite.
    """
    group = policy.group_of.get(name, 0)
    stds = [std if std > 0 else 1.0 for std in policy.stds]
    if isinstance(group, tuple):
        inside, outside = (torch.tensor(stds[k], device=device) for k in group)
        return torch.where(policy.masks[name].to(device), inside, outside)
    return torch.tensor(stds[group], device=device)
