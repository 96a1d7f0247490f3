"""Generators of the user's own: found where data sets and collators hold them, and held in a check."""

import functools
import random
import weakref

import numpy
import pytest
import torch
from torch.utils.data import Subset

from fastdp.calls.generators import SEEDS, HeldGenerators, callers_generators, callers_tensors, own_generators
from fastdp.calls.randomness import preserve_rng, rng_state, seed_own_generators, unchanged

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


class Module(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator


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
    # Transforms stand in lists, and may be modules.
    composed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleList([Module(generator)]))
    assert own_generators(Noised({"train": [Noised(generator)]})) == own_generators(composed) == [generator]
    assert own_generators([generator] * 100, torch.zeros(2), print, random, random.SystemRandom()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_drawn_is_told(kind):
    with (held := HeldGenerators(Noised(KINDS[kind][0]()))):
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


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_holds_is_a_random_state_of_its_passes(kind):
    make, draw = KINDS[kind]
    model = torch.nn.Sequential(Module(make()))
    before = rng_state(model)
    with preserve_rng(model):
        draw(model[0].generator)
        assert rng_state(model) != before
    assert rng_state(model) == before
    seed_own_generators(model)
    assert rng_state(model) != before
    # A generator that is replaced between checks is found in the next one.
    with unchanged(model):
        model[0].generator = make()
    with unchanged(model):
        before = rng_state(model)
        draw(model[0].generator)
        assert rng_state(model) != before


def test_a_loop_s_generators_are_those_of_its_functions_and_their_self():
    class Trainer:
        def __init__(self):
            self.generator = random.Random(1)

        def fit(self):
            local = torch.Generator()
            return callers_generators(), local, shared

    trainer = Trainer()
    found, local, _ = trainer.fit()
    assert {id(trainer.generator), id(local), id(shared)} <= set(map(id, found))


def test_what_a_loop_can_reach_is_neither_kept_nor_taken_from_it():
    def lets_go():
        batch = torch.zeros(3)
        known, gone = callers_tensors(), weakref.ref(batch)
        assert any(t is batch for t in known)
        del batch, known
        return gone() is None

    def keeps_its_variables():
        seen = locals()
        size = 3
        assert locals() is seen
        callers_tensors()
        return seen["size"] == size

    assert lets_go()
    assert keeps_its_variables()


def test_a_generator_near_by_is_found_though_a_long_way_leads_to_it_too():
    """An object that was first met far away is looked into where it is near."""

    class Holder:
        def __init__(self, **parts):
            self.__dict__ |= parts

    own = torch.Generator()
    near = Holder(generator=own)
    far = near
    for _ in range(8):
        far = Holder(inner=far)
    assert own_generators(Holder(near=near, far=far)) == [own]
    assert own_generators(Holder(far=far, near=near)) == [own]
