"""What both kinds of canaries share: their coins, their place in a private run, and the verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fastdp.audit.guessing import SHARES, AuditResult, conclude
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy, Unclipped
from fastdp.ops.stream import NoiseStream
from fastdp.private.observer import Observer

if TYPE_CHECKING:
    from fastdp.private.run import Private


class Canaries(Observer, ABC):
    """Canaries in one private run, each included by a fair coin of its own.

    Attach to a run before its first step, train as ever, then ask for `result`. The weights of an audited run have been
    trained on canaries: they are for the audit, not for use.

    Args:
        private: what `fastdp.make_private` returned, before its first step.
        count: number of canaries, at least 2.
        unsafe_seed: makes coins and directions reproducible; for tests.

    Raises ValueError for fewer than 2 canaries, a run that has begun, or one that makes no claim.
    """

    def __init__(self, private: Private, count: int, *, unsafe_seed: int | None = None):
        if count < 2:
            raise ValueError(f"{count} canaries cannot be ranked: use at least 2, and hundreds to show anything")
        if not private.ledger.untouched:
            raise ValueError("canaries belong into a run before its first step; make the run private anew")
        if isinstance(private.policy, Unclipped):
            raise ValueError("the non-private method claims nothing, so there is nothing to audit")
        if any(isinstance(observer, Canaries) for observer in private.observers):
            raise ValueError("this run is being audited already; detach its canaries first")
        self.private = private
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        #: The coins: whether each canary is in the data, bool [m].
        self.included = self.stream.bernoulli(count, 0.5)
        self.releases = 0
        private.observe(self)

    def __len__(self) -> int:
        return self.included.shape[0]

    def after_release(self, accumulator: Accumulator) -> None:
        """Take in what was released."""
        self.score_release(accumulator.policy)
        self.releases += 1

    @abstractmethod
    def score_release(self, policy: Policy) -> None:
        """Called when `.grad` of each trained parameter holds what was released."""

    @abstractmethod
    def scores(self) -> torch.Tensor:
        """One score a canary, float [m]: the higher, the more it looks included."""

    def result(
        self, confidence: float = 0.95, delta: float | None = None, shares: Sequence[float] = SHARES
    ) -> AuditResult:
        """The lower bound on epsilon, beside what the run claims to have spent so far.

        The probability of a false alarm is at most 1 - confidence, and epsilon is stated at the run's target ``delta`` or
        another. Choose the ``shares`` (see `fastdp.audit.conclude`) before looking at any score.
        """
        delta = self.private.target_delta if delta is None else delta
        if delta is None:
            raise ValueError("no target_delta was given to the run; pass delta")
        if self.private.ledger.untouched:
            raise ValueError("nothing was released yet: train before asking for the result")
        scores, claimed = self.scores(), self.private.epsilon(delta)
        return conclude(scores, self.included, claimed=claimed, delta=delta, confidence=confidence, shares=shares)

    def detach(self) -> None:
        """Take the canaries out of the run; scores and coins stay."""
        self.private.unobserve(self)


def noise_std(policy: Policy, name: str, device: torch.device) -> torch.Tensor:
    """A parameter's `Policy.std_of`, and 1 where there is no noise, so that scores divided by it stay finite."""
    std = policy.std_of(name, device)
    return torch.where(std > 0, std, 1.0)
