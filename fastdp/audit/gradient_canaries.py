"""Canaries in the space of gradients: extra units whose gradients are crafted, orthogonal and larger than any bound."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastdp.audit.canaries import Canaries, noise_std
from fastdp.engine.bounds import Errors, Norms, UpperNorms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.validate import one_of

if TYPE_CHECKING:
    from fastdp.private.run import Private


#: Norm of a canary's gradient over the norm of all clipping bounds.
_MAGNITUDE = 1000.0


@dataclass(frozen=True)
class _Share:
    """A parameter's coordinates: the canary that each belongs to, int64 [n], and its sign there, float [n]."""

    owner: torch.Tensor
    sign: torch.Tensor


class GradientCanaries(Canaries):
    """White-box canaries: canary i stands for a unit whose gradient is plus or minus one number on coordinates of its own.

    The coordinates of all trained parameters are dealt out among the canaries at random. Their gradients are exactly
    orthogonal, and each reaches into as many parameters as it can. A gradient is far longer than the clipping
    bound; it goes through the policy's scales into the sum of the logical batch, and so through the run's own noise. An
    included canary takes part in a logical batch as any unit does: by the run's sampling.

    The score is the inner product of what was released with the canary's direction, in units of the stated noise, with a
    sign that alternates from step to step: noise that is used twice cancels out of it.

    These canaries test the policy's scales, the noise, its independence from step to step, and the accounting. How the
    norms of real examples are found is tested by `ExampleCanaries`.

    Args:
        private: as in `Canaries`.
        count: m; at most the number of trained coordinates.
        statistic: "mean" scores by the inner product; "variance" by the energy of the released coordinates, for noise
            whose size depends on the data.
        unsafe_seed: as in `Canaries`.

    Raises ValueError as `Canaries`, and for a count or statistic outside the above.
    """

    def __init__(self, private: Private, count: int, *, statistic: str = "mean", unsafe_seed: int | None = None):
        parameters = private.parameters
        total = sum(p.numel() for p in parameters.values())
        if count > total:
            raise ValueError(f"{count} canaries need as many coordinates, and {total} are trained; use at most {total}")
        one_of(("mean", "variance"), statistic=statistic)
        super().__init__(private, count, unsafe_seed=unsafe_seed)
        self.statistic = statistic
        generator = torch.Generator().manual_seed(secrets.randbits(63) if unsafe_seed is None else unsafe_seed)
        self._shares = _deal({name: p.numel() for name, p in parameters.items()}, count, generator)
        policy = private.policy
        self._height = _MAGNITUDE * math.sqrt(sum(bound**2 for bound in policy.bounds)) / math.sqrt(total / count)
        self._scores = torch.zeros(count, dtype=torch.float64)
        #: Shuffled sampling: the step of the pass in which each canary takes part.
        self._turn: torch.Tensor | None = None
        self._step_of_pass = 0

    def begin_pass(self) -> None:
        """Shuffled sampling: draw the step of the pass in which each canary takes part."""
        self._step_of_pass = 0
        if self.private.plan.sampling == "shuffled":
            steps = self.private.steps_per_epoch
            self._turn = torch.from_numpy((self.stream.uniform64(len(self)) % steps).astype("int64"))

    def _coefficients(self) -> torch.Tensor:
        """What each canary adds to this logical batch, in clipped gradients: 1, 0, or -1 for one that was replaced."""
        absent = -1.0 if self.private.plan.adjacency == "replace_one" else 0.0
        coins = torch.where(self.included, 1.0, absent)
        if self._turn is not None:
            return coins * (self._turn == self._step_of_pass)
        return coins * self.stream.bernoulli(len(self), self.private.sample_rate)

    @property
    def _phase(self) -> float:
        return 1.0 if self.releases % 2 == 0 else -1.0

    def before_release(self, accumulator: Accumulator) -> None:
        """Clip the canaries' gradients as the policy says, and add them to the sums."""
        sums, policy = accumulator.sums, accumulator.policy
        coefficients = self._coefficients()
        upper = self._upper(policy)
        factors = accumulator.unit_scales(upper, coefficients.abs().to(upper.norms.device))
        for name, values in self._contributions(policy, factors * coefficients.sign().to(factors.device)):
            added = self._phase * values
            sums[name] = sums[name] + added if name in sums else added

    def score_release(self, policy: Policy) -> None:
        """Add the projections of what was released to the scores."""
        scales = policy.scales(self._upper(policy))
        inner = torch.zeros(len(self), dtype=torch.float64)
        size = torch.zeros(len(self), dtype=torch.float64)
        for name, values in self._contributions(policy, scales):
            gradient = self.private.parameters[name].grad
            assert gradient is not None
            seen = gradient.detach().double().cpu() * self.private.expected_batch_size
            owner = self._shares[name].owner
            if self.statistic == "variance":
                inner.index_add_(0, owner, seen.reshape(-1).square())
                size.index_add_(0, owner, torch.ones(owner.shape[0], dtype=torch.float64))
                continue
            std = noise_std(policy, name, gradient.device).double().cpu()
            values = values.double().cpu()
            inner.index_add_(0, owner, (self._phase * seen * values / std.square()).reshape(-1))
            size.index_add_(0, owner, (values / std).square().reshape(-1))
        self._scores += inner / size.clamp(min=1e-300).sqrt()
        self._step_of_pass += 1

    def scores(self) -> torch.Tensor:
        """Sums over the steps so far, float64 [m]; about standard normal times sqrt(steps) for an excluded canary."""
        return self._scores.clone()

    def _present(self) -> Iterator[tuple[str, torch.nn.Parameter, _Share]]:
        """The parameters of the run's present stage; a method may have frozen others."""
        for name, parameter in self.private.parameters.items():
            if name in self._shares:
                yield name, parameter, self._shares[name]

    def _upper(self, policy: Policy) -> UpperNorms:
        """Norms of the canaries' gradients ``[groups, m]``, known exactly."""
        device = next(iter(self.private.parameters.values())).device
        counts = torch.zeros(len(policy.bounds), len(self), device=device)
        for name, _, share in self._present():
            places = _groups(policy, name, share).to(device), share.owner.to(device)
            counts.index_put_(places, torch.ones(len(share.owner), device=device), accumulate=True)
        norms = Norms(len(policy.bounds), len(self), device)
        # Counts and their squares are exact to far less than 2^-20 in float32.
        for group, squares in enumerate(counts * self._height**2):
            norms.add(group, squares, Errors(1, 2.0**-20))
        return norms.upper()

    def _contributions(self, policy: Policy, factors: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's canary gradients times ``factors`` [groups, m], all canaries together, of its shape."""
        for name, parameter, share in self._present():
            scale = factors[_groups(policy, name, share).to(factors.device), share.owner.to(factors.device)]
            yield name, (self._height * share.sign.to(factors.device) * scale).view(parameter.shape)


def _groups(policy: Policy, name: str, share: _Share) -> torch.Tensor:
    """The group of each coordinate of a parameter, int64 [n]."""
    group = policy.group_of[name]
    if isinstance(group, tuple):
        return torch.where(policy.masks[name].reshape(-1), *group)
    return torch.full_like(share.owner, group)


def _deal(sizes: dict[str, int], count: int, generator: torch.Generator) -> dict[str, _Share]:
    """Deal each parameter's coordinates out in random order, going on with the next canary from one to the next."""
    shares, dealt = {}, 0
    for name, size in sizes.items():
        owner = torch.empty(size, dtype=torch.int64)
        owner[torch.randperm(size, generator=generator)] = (dealt + torch.arange(size)) % count
        sign = torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1
        shares[name] = _Share(owner, sign)
        dealt += size
    return shares
