"""Generators of the user's own: found where data sets and collators hold them, and held in a check."""

import functools
import random

import numpy
import pytest
import torch
from torch.utils.data import Subset

from fastdp.calls.generators import SEEDS, HeldGenerators, own_generators, seed_own_generators

KINDS = {
    "python": (lambda: random.Random(0), lambda g: g.random()),
    "numpy": (lambda: numpy.random.default_rng(0), lambda g: g.random()),
    "numpy's older": (lambda: numpy.random.RandomState(0), lambda g: g.rand()),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda g: float(torch.rand((), generator=g))),
}
shared = random.Random(0)


class Noised:
    def __init__(self, generator):
        self.generator = generator

    def __getitem__(self, index):
        return index


class Shared:
    def __getitem__(self, index):
        return index + shared.random()


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_held_within_and_seeded_from_the_operating_system(kind):
    make, draw = KINDS[kind]
    generator = make()
    held = HeldGenerators(Noised(generator))
    with held:
        first = draw(generator)
    assert held.drawn
    draw(generator)
    with held:
        assert draw(generator) == first
    seed_own_generators(Noised(generator))
    one = draw(generator)
    seed_own_generators(Noised(generator))
    assert len({first, one, draw(generator)}) == 3


def test_they_are_found_in_wrappers_closures_and_by_a_function_s_names():
    generator = random.Random(0)

    def closed(items):
        return generator.random()

    found = [
        Subset(Noised(generator), [0]),
        closed,
        functools.partial(lambda g, items: g.random(), generator),
        Noised(generator).__getitem__,
    ]
    assert all(own_generators(owner) == [generator] for owner in found)
    assert own_generators(Shared()) == [shared]
    assert own_generators([generator], torch.zeros(2), print, random) == []


def test_nothing_drawn_is_told():
    with (held := HeldGenerators(Noised(random.Random(0)))):
        pass
    assert not held.drawn


@pytest.mark.parametrize("kind", KINDS)
def test_what_happens_with_some_chance_happens_under_one_of_two_seeds(kind):
    make, draw = KINDS[kind]
    generator, first = make(), []
    for seed in SEEDS:
        with HeldGenerators(Noised(generator)).at(seed):
            first.append(draw(generator))
    assert first[0] < 0.1
    assert first[1] > 0.9
