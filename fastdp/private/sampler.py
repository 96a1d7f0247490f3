"""Which units take part in each logical batch. A run's samplers come from its `Plan`, as their events do."""

from __future__ import annotations

import math
import numbers
import pickle
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch

from fastdp.ops.stream import NoiseStream


class Units:
    """The units of privacy of a data set and the examples of each.

    Args:
        size: number of examples.
        user_ids: the user of each example, for user-level privacy; None makes every example a unit.
        max_examples_per_user: at most so many of a user's examples are used, the first ones in the data set.
    """

    def __init__(self, size: int, user_ids: Sequence[Hashable] | None = None, max_examples_per_user: int | None = None):
        self.size = size
        self.members: list[list[int]] | None = None
        self.largest = 1
        if user_ids is None:
            return
        if isinstance(user_ids, str):
            raise ValueError(f"user_ids is the text {user_ids!r}: give a list with the user of each example")
        if len(user_ids) != size:
            raise ValueError(f"user_ids has {len(user_ids)} entries for {size} examples; give one an example")
        if max_examples_per_user is None or max_examples_per_user < 1:
            raise ValueError("with user_ids, state max_examples_per_user (at least 1): it bounds one user's share")
        groups: dict[Hashable, list[int]] = {}
        # Where an id of each kind first stands.
        seen: dict[type, int] = {}
        for index, user in enumerate(user_ids):
            if isinstance(user, torch.Tensor) and user.numel() == 1:
                user = user.item()
            if isinstance(user, (list, dict, set, torch.Tensor, np.ndarray)):
                raise ValueError(
                    f"user_ids has a {type(user).__name__} at example {index}: give text or a number for each example"
                )
            if not _equals_its_copy(user):
                raise ValueError(
                    f"Example {index} has no user: its id is {user}, which equals no other. Give it an id that "
                    "it shares with its person's rows."
                )
            for kind in (str, numbers.Number):
                if isinstance(user, kind):
                    seen.setdefault(kind, index)
            members = groups.setdefault(user, [])
            if len(members) < max_examples_per_user:
                members.append(index)
        if len(seen) > 1:
            text, number = user_ids[seen[str]], user_ids[seen[numbers.Number]]
            raise ValueError(
                f"user_ids has text beside numbers, like {text!r} and {number!r}, so one person may count as "
                "two. Give ids of one type."
            )
        self.members = list(groups.values())
        self.largest = max(map(len, self.members))

    def __len__(self) -> int:
        return self.size if self.members is None else len(self.members)

    def examples(self, unit: int) -> list[int]:
        return [unit] if self.members is None else self.members[unit]


def _equals_its_copy(user: Hashable) -> bool:
    """Whether an id equals another that is made alike: NaN does not, nor what holds one, nor objects without equality."""
    if isinstance(user, (str, int, bytes)) or user is None:
        return True
    try:
        again = pickle.loads(pickle.dumps(user))
        return bool(again is user or (again == user and hash(again) == hash(user)))
    except Exception:
        return False


class PoissonSampler:
    """Every unit joins every logical batch independently with probability ``sample_rate``."""

    def __init__(self, units: int, sample_rate: float, stream: NoiseStream):
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample rate {sample_rate} is outside (0, 1]: the batch size must be between 1 and N")
        self.units, self.sample_rate, self.stream = units, sample_rate, stream

    def epoch(self, steps: int) -> Iterator[list[int]]:
        """The units of ``steps`` successive logical batches."""
        for _ in range(steps):
            taken = torch.as_tensor(self.stream.bernoulli(self.units, self.sample_rate))
            yield taken.nonzero().reshape(-1).tolist()

    def most(self, tail: float) -> int:
        """A number of units that a batch exceeds with probability at most ``tail``."""
        from scipy.stats import binom

        return max(1, int(binom.isf(tail, self.units, self.sample_rate)))


class ShuffledSampler:
    """A fresh permutation an epoch, cut into batches; accounted without amplification by sampling.

    What is shuffled and cut are ceil(N / B) B places, of which the last are empty. A unit that is left out leaves its
    place empty, so that one batch loses its gradient and every other unit stays where it was; were the units themselves
    cut, each of those behind it would move up, and two units would change in every batch.
    """

    def __init__(self, units: int, batch_size: int, stream: NoiseStream):
        self.units, self.batch_size, self.stream = units, batch_size, stream

    def epoch(self, steps: int) -> Iterator[list[int]]:
        places = torch.as_tensor(
            self.stream.permutation(steps_per_epoch(self.units, self.batch_size) * self.batch_size)
        )
        for batch in places.split(self.batch_size)[:steps]:
            yield [unit for unit in batch.tolist() if unit < self.units]

    def most(self, tail: float) -> int:
        """A number of units that no batch exceeds."""
        return self.batch_size


Sampler = PoissonSampler | ShuffledSampler


def steps_per_epoch(units: int, batch_size: int) -> int:
    """ceil(N / B), N and B counted in units."""
    return math.ceil(units / batch_size)
