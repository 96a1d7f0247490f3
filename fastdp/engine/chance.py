"""What loop, collator and model draw by chance: from a seed, to repeat a pass, or so that nobody can know it.

A mask of dropout belongs to the place of its row, and a row's place to who else was drawn. While nobody knows the masks that
is no matter: every order of them is as likely. A seed that others know makes them a function of the places, and one record
more moves the share of each behind it, which no clip bounds. So a private run draws from the operating system instead.
"""

from __future__ import annotations

import functools
import os
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch

_WORDS = 624


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Every random state of a processor set to this seed meanwhile, and put back."""
    with _put_back(()):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)  # noqa: NPY002
        yield


@contextmanager
def secretly(devices: Sequence[int] = ()) -> Iterator[None]:
    """Every random state, and those of these GPUs, set to what the operating system draws meanwhile, and put back."""
    with _put_back(devices):
        forget_seeds()
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
        yield


def forget_seeds() -> None:
    """Set every random state of the host to what the operating system draws, whoever has seeded it."""
    torch.set_rng_state(_unknown_state())
    random.seed(os.urandom(32))
    numpy.random.seed(numpy.frombuffer(os.urandom(32), dtype=numpy.uint32))  # noqa: NPY002


def _unknown_state() -> torch.Tensor:
    """A state of torch's generator on processors, which takes no more than 32 bits of a seed: all its words drawn."""
    known, start = _known_state()
    state = known.clone()
    words = state.numpy()[start : start + 8 * _WORDS].view(numpy.uint64)
    words[:] = numpy.frombuffer(os.urandom(4 * _WORDS), numpy.uint32)
    return state


@functools.cache
def _known_state() -> tuple[torch.Tensor, int]:
    """The state that one seed makes, and where its words begin."""
    state = torch.Generator().manual_seed(5489).get_state()
    # The first words of the state that this seed makes, as the generator's authors print them.
    start = state.numpy().tobytes().find(struct.pack("<QQ", 5489, 1301868182))
    if start < 0:
        raise RuntimeError(
            f"the random state of torch {torch.__version__} is not known, so that masks could be guessed"
        )
    return state, start


@contextmanager
def _put_back(devices: Sequence[int]) -> Iterator[None]:
    # Numpy's generator is another one meanwhile, as copying a state takes longer than a small layer.
    state, own = random.getstate(), numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    numpy.random.set_bit_generator(numpy.random.MT19937() if own is _spare() else _spare())  # type: ignore[attr-defined]
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)
        numpy.random.set_bit_generator(own)  # type: ignore[attr-defined]


@functools.cache
def _spare() -> numpy.random.BitGenerator:
    return numpy.random.MT19937()
