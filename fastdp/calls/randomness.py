"""Random states: seeded to repeat a pass, drawn from the operating system to train, and restored after a probe.

A dropout mask belongs to the position of its row, and that position depends on which other rows were drawn. A known seed would
make the masks a function of positions, so one more record would move every record behind it by an amount that no clip bounds.
A private run therefore draws from the operating system.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fastdp.calls.composite import COMPOSITE
from fastdp.calls.errors import SelfCheckError
from fastdp.calls.generators import HeldGenerators, own_generators, set_seed

_WORDS = 624


def devices(model: torch.nn.Module) -> list[int]:
    """The GPUs that hold a model, whose random state belongs to its own."""
    # Each replay asks, and a walk over a large model takes as long as a small one's pass.
    on_gpus = model.parameters() if _gpu_generators() else ()
    return sorted({p.device.index or 0 for p in on_gpus if p.device.type not in ("cpu", "meta")})


def _gpu_generators() -> Sequence[torch.Generator]:
    """The generators of all GPUs, of any vendor; none before there is a tensor on one."""
    return getattr(torch.get_device_module(), "default_generators", ())


@contextmanager
def seeded(seed: int, *owners: Any) -> Iterator[None]:
    """Set every random state of the host, and those that ``owners`` hold, to this seed, and restore them afterwards."""
    with seed_from_os(), HeldGenerators(*owners).at(seed):
        seed_everything(seed)
        yield


def seed_everything(seed: int) -> None:
    """Set every random state of the host to this seed."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002


@contextmanager
def seed_from_os(devices: Sequence[int] = ()) -> Iterator[None]:
    """Seed every random state of the host and of these GPUs from the operating system, and restore them afterwards."""
    state, own, (spare, words) = random.getstate(), numpy.random.get_bit_generator(), _spare()  # type: ignore[attr-defined]
    generators = [torch.default_generator, *(_gpu_generators()[index] for index in devices)]
    states = [generator.get_state() for generator in generators]
    # A loop that leaves its iterator open ends it with the interpreter, where nothing draws any more and modules are gone.
    finalizing = sys.is_finalizing
    # Numpy's bit generator is swapped: copying its state, or seeding it, takes longer than a small layer.
    if own is spare or words is None:
        # A new one begins at numbers of the operating system too.
        spare = numpy.random.MT19937()
    else:
        words[:_WORDS], words[_WORDS] = numpy.frombuffer(os.urandom(4 * _WORDS), numpy.uint32), _WORDS
    numpy.random.set_bit_generator(spare)  # type: ignore[attr-defined]
    try:
        _forget_others()
        for index in devices:
            _gpu_generators()[index].manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
        yield
    finally:
        if not finalizing():
            for generator, before in zip(generators, states):
                generator.set_state(before)
            random.setstate(state)
            numpy.random.set_bit_generator(own)  # type: ignore[attr-defined]


def forget_seeds() -> None:
    """Seed every random state of the host from the operating system, whatever the user's seed."""
    _forget_others()
    numpy.random.seed(numpy.frombuffer(os.urandom(32), dtype=numpy.uint32))  # noqa: NPY002


def _forget_others() -> None:
    """`forget_seeds` of torch and Python."""
    torch.default_generator.set_state(_unknown_state())
    random.seed(int.from_bytes(os.urandom(32), "little"))


@functools.cache
def _spare() -> tuple[numpy.random.BitGenerator, numpy.ndarray | None]:
    """A bit generator of numpy, and its state where it lies, if that is known: the words, and how many of them are used."""
    spare = numpy.random.MT19937()
    held: Any = (ctypes.c_uint32 * (_WORDS + 1)).from_address(spare.ctypes.state_address)
    words = numpy.frombuffer(held, numpy.uint32)
    known: Any = spare.state["state"]
    return spare, words if [*words] == [*known["key"], known["pos"]] else None


def rng_state(model: torch.nn.Module | None = None) -> tuple[bytes, ...]:
    """Fingerprint of every generator that a pass of this model may draw from: torch's, Python's, numpy's and its own.

    Without a model, of the host's alone.
    """
    used, own = ((), []) if model is None else (devices(model), _held_generators(model).states())
    states = [torch.get_rng_state(), *(_gpu_generators()[index].get_state() for index in used)]
    python, numbers = hash(random.getstate()), numpy.random.get_state(legacy=True)  # noqa: NPY002
    return *(state.numpy().tobytes() for state in states), repr((python, numbers[2])).encode(), bytes(numbers[1]), *own  # type: ignore[index]


#: The generators that a model holds, as the latest check found them: a walk takes longer than a small layer.
_GENERATORS: WeakKeyDictionary[torch.nn.Module, list[Any]] = WeakKeyDictionary()


def _held_generators(model: torch.nn.Module) -> HeldGenerators:
    if model not in _GENERATORS:
        _GENERATORS[model] = own_generators(model)
    return HeldGenerators(*_GENERATORS[model])


@contextmanager
def preserve_rng(model: torch.nn.Module) -> Iterator[None]:
    """Restore every random state afterwards."""
    python, numbers = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=devices(model)), _held_generators(model):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)  # noqa: NPY002


class BufferSnapshot:
    """The buffers of a model as they are now, all or those of some names; `restore` puts their tensors and values back.

    Attributes, hooks and parameters are never touched.
    """

    def __init__(self, model: torch.nn.Module, only: Collection[str] | None = None):
        every = [] if only == frozenset() else list(model.named_buffers())
        self._module_buffers = [
            (m, dict(m._buffers)) for m in model.modules() if only is None and m._buffers and not _is_scripted(m)
        ]
        self._copies = [(b, version(b), b.detach().clone()) for n, b in every if only is None or n in only]

    def restore(self) -> None:
        """Put back what was replaced or written in place since."""
        for module, held in self._module_buffers:
            if any(module._buffers.get(name) is not buffer for name, buffer in held.items()):
                module._buffers.update(held)
        with torch.no_grad():
            for at, (buffer, before, values) in enumerate(self._copies):
                # Torch counts no write of batch normalization to its running statistics.
                if version(buffer) != before or (buffer.is_floating_point() and not torch.equal(buffer, values)):
                    buffer.copy_(values)
                    self._copies[at] = buffer, version(buffer), values


@contextmanager
def unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model's buffers and every random state afterwards."""
    snapshot = BufferSnapshot(model)
    _GENERATORS.pop(model, None)
    try:
        with preserve_rng(model):
            yield
    finally:
        snapshot.restore()


def version(tensor: torch.Tensor) -> int:
    """How often torch counted an in-place write to a tensor; 0 for inference tensors, which have no count."""
    return 0 if tensor.is_inference() else tensor._version


def was_written(before: tuple[torch.Tensor, int] | None, after: tuple[torch.Tensor, int]) -> bool:
    """Whether a buffer was written, or replaced by one of other values: a model may be moved to another device."""
    if before is None or before[0] is after[0]:
        return before is None or before[1] != after[1]
    old, new = before[0], after[0]
    same = version(old) == before[1] and old.shape == new.shape and old.dtype == new.dtype
    return not (same and torch.equal(old.to(new.device), new))


def _is_scripted(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


_DROPOUT = frozenset(
    getattr(F, name)
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
) | {torch.dropout}


class _Changed(TorchFunctionMode):
    """Changes the arguments of some of torch's functions, and of those within composite ones.

    Enter it within modes that observe: what those do themselves then does not come here.
    """

    functions: frozenset[Any]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COMPOSITE:
            with self:
                return COMPOSITE[func](*args, **(kwargs or {}))
        if func in self.functions:
            return self.change(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def change(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError  # each kind has its own


class DropoutDisabled(_Changed):
    """Make torch's dropout functions return their input; modules and their attributes stay untouched.

    Attributes:
        used: whether some dropout was disabled.
    """

    functions = _DROPOUT | {F.scaled_dot_product_attention}
    used = False

    def change(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _DROPOUT:
            rate, training = kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get("training", True)
            self.used |= bool(rate and (args[2] if len(args) > 2 else training))
            return args[0] if args else kwargs["input"]
        self.used |= bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
        if len(args) > 4:
            return func(*args[:4], 0.0, *args[5:], **kwargs)
        return func(*args, **{**kwargs, "dropout_p": 0.0})


class MasksInOrder(_Changed):
    """Draw masks in the order of a tensor's entries, whatever its strides: torch draws them in the order of memory."""

    functions = _DROPOUT | {torch.rand_like, torch.randn_like, torch.bernoulli}

    def change(self, func: Any, args: Any, kwargs: Any) -> Any:
        in_place = kwargs.get("inplace", len(args) > 3 and args[3])
        if args and type(args[0]) is torch.Tensor and not in_place:
            args = (args[0].contiguous(), *args[1:])
        return func(*args, **kwargs)


def seeds_for(tops: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Upstream gradients that are the same whenever the outputs have these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator).to(t.device, t.dtype) for t in tops]


def seed_own_generators(*owners: Any) -> None:
    """Seed them from the operating system."""
    for generator in own_generators(*owners):
        if isinstance(generator, torch.Generator) and generator.device.type == "cpu":
            generator.set_state(_unknown_state())
        else:
            set_seed(generator, int.from_bytes(os.urandom(32), "little"))


def _unknown_state() -> torch.Tensor:
    """A state of torch's CPU generator with every word drawn; a seed would set 32 bits of it."""
    state, words = _state_and_words()
    words[:] = numpy.frombuffer(os.urandom(4 * _WORDS), numpy.uint32)
    return state


@functools.cache
def _state_and_words() -> tuple[torch.Tensor, numpy.ndarray]:
    """A state of torch's CPU generator, to be written again and again, and its words within it, uint64."""
    state = torch.Generator().manual_seed(5489).get_state()
    # The first words of the state that this seed makes, as the generator's authors print them.
    start = state.numpy().tobytes().find(struct.pack("<QQ", 5489, 1301868182))
    if start < 0:
        raise RuntimeError(
            f"the random state of torch {torch.__version__} is not known, so that masks could be guessed"
        )
    return state, state.numpy()[start : start + 8 * _WORDS].view(numpy.uint64)


@contextmanager
def repeatable(model: torch.nn.Module) -> Iterator[None]:
    """Raise `SelfCheckError` if a backward pass meanwhile drew random numbers of its own: a second one would see others."""
    before = rng_state(model)
    yield
    if rng_state(model) != before:
        raise SelfCheckError(
            "The backward pass draws random numbers of its own. Checkpoint with preserve_rng_state=True, and "
            "draw from torch alone; this batch was not released."
        )
