"""Where all of the package's randomness comes from: ChaCha keyed by the operating system, addressed by position.

Layout, shared by every implementation (``csrc/chacha.h``, ``kernels/``). A *position* is twelve 32-bit words: the key
(8, little endian), a tensor id (31 bits), the low and high half of a 64-bit step, and a number of double rounds. Block
``b`` at a position is the block function of RFC 8439, section 2.3, of so many double rounds (10 in the RFC: ChaCha20; 6
for ChaCha12), on the state ``constants, key, b, tensor, step_low, step_high``; the top bit of the tensor word is a domain
flag, set only for the second halves of 64-bit uniforms.

The sixteen words ``w`` of block ``b`` give the standard normals of elements ``16 b .. 16 b + 15`` of a flattened
tensor: for ``k`` in 0..7, with ``v`` the same block under the domain flag,

* ``u = (w[k] + .5) / 2^32``, unless the top 16 bits of ``w[k]`` are zero: then ``u = (w[k] 2^32 + v[k] + .5) / 2^64``;
* ``r = sqrt(-2 ln u)`` and ``theta = 2 pi (w[k + 8] + .5) / 2^32``;
* element ``16 b + k`` is ``r cos(theta)`` and element ``16 b + 8 + k`` is ``r sin(theta)`` (Box and Muller, 1958).

The largest radius is ``sqrt(2 * 65 * ln 2)`` = 9.49, reached with the probability it should have.

Secure rounding needs the uniforms to more bits (`fastdp.ops.grid`). ``w`` and ``v`` are the first 64 of 128, for radius and
angle alike. The rest are the same words of block ``b + 2^31``, first under the domain flag and then without.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NoReturn

import numpy as np
import torch

import fastdp._native as _native

#: Words of a position: key (8), tensor id, low and high half of the step, double rounds.
POSITION_WORDS = 12
#: Rounds of ChaCha that a stream may have; the first unless another is asked for.
CIPHER_ROUNDS = (20, 12)
_DOUBLE_ROUNDS = frozenset(rounds // 2 for rounds in CIPHER_ROUNDS)
#: Block counters are 32 bits wide, and a block makes 16 words.
MAX_ELEMENTS = 1 << 36
#: Tensor ids that ``at`` accepts are below this; those above belong to the stream's own draws.
MAX_TENSORS = (1 << 31) - 16

_DOMAIN_FLAG = np.uint32(1 << 31)
_SERIAL_TENSOR = (1 << 31) - 1
_CONSTANTS = np.array([0x61707865, 0x3320646E, 0x79622D32, 0x6B206574], np.uint32)


class NoiseStream:
    """A source of noise that never repeats itself: ChaCha (RFC 8439) with 32 bytes of key from the operating system.

    An op that draws takes a stream as its last argument and claims the next unused position of it. An engine that wants
    the noise of a tensor to be independent of the order of calls passes ``stream.at(step, tensor)`` instead.

    The key is never shown, copied or saved: pickling, copying and ``state_dict`` raise TypeError. A process made by
    ``os.fork`` gets a new key, so parent and child never share noise (unless built by ``unsafe_reproducible``).

    Args:
        rounds: of ChaCha, 20 or 12: what is assumed of 12, and what they save, stands in docs/noise.md.

    Raises:
        ValueError: for another number of rounds.
        TypeError: when it is copied or pickled.

    >>> from fastdp.ops import add_noise_
    >>> add_noise_(torch.zeros(3), 1.0, NoiseStream()).shape
    torch.Size([3])
    """

    __slots__ = ("__weakref__", "_at_step", "_claimed", "_key", "_lock", "_serial", "reproducible", "rounds")

    def __init__(self, rounds: int = 20) -> None:
        self._start(os.urandom(32), rounds, reproducible=False)

    @classmethod
    def shared(cls, exchange: Callable[[], bytes], rounds: int = 20) -> NoiseStream:
        """A stream that several processes have, so that all of them add the same noise to the same sum.

        Args:
            exchange: gives each of them the same 32 bytes, which one of them had from its operating system just then.
            rounds: of ChaCha, 20 or 12, in all of them.
        """
        key = exchange()
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        stream = cls.__new__(cls)
        stream._start(key, rounds, reproducible=False)
        return stream

    @classmethod
    def unsafe_reproducible(cls, seed: int, rounds: int = 20) -> NoiseStream:
        """A stream anyone who knows ``seed`` can repeat, and so no protection at all: for tests only.

        Raises:
            ValueError: if the seed is negative or has more than 256 bits, or for rounds other than 20 and 12.
        """
        if not 0 <= int(seed) < 1 << 256:
            raise ValueError(f"the seed must be between 0 and 2^256 - 1, got {seed}")
        stream = cls.__new__(cls)
        stream._start(int(seed).to_bytes(32, "little"), rounds, reproducible=True)
        return stream

    def _start(self, key: bytes, rounds: int, reproducible: bool) -> None:
        if rounds not in CIPHER_ROUNDS:
            raise ValueError(f"rounds is {rounds!r}: ChaCha has 20 here, or 12 where that is asked for")
        #: Of ChaCha, at each of its positions.
        self.rounds = int(rounds)
        #: True if the stream was built by ``unsafe_reproducible``: what it protects is not private.
        self.reproducible = reproducible
        self._key = np.frombuffer(key, dtype="<u4").astype(np.uint32)
        self._serial = 0
        self._at_step = 0
        self._claimed: set[int] = set()
        self._lock = threading.Lock()
        _streams.add(self)

    def at(self, step: int, tensor: int) -> Draw:
        """The one draw of ``tensor`` (an id, 0 <= tensor < MAX_TENSORS) at ``step`` (0 <= step < 2^64).

        The same key, step and tensor give the same noise on every device, whatever the threads and the order of calls.
        Steps may not go back, and a position can be drawn once: a second draw raises RuntimeError.

        Raises:
            ValueError: if the step or the tensor id is out of range.
        """
        if not 0 <= step < 1 << 64:
            raise ValueError(f"the step must be between 0 and 2^64 - 1, got {step}")
        if not 0 <= tensor < MAX_TENSORS:
            raise ValueError(f"the tensor id must be between 0 and {MAX_TENSORS - 1}, got {tensor}")
        return Draw(self, int(step), int(tensor))

    def take(self) -> torch.Tensor:
        """Claim the next unused position: int32 [12], the words of the layout above, on the CPU."""
        with self._lock:
            serial = self._serial
            self._serial += 1
            return self._positions(serial, (_SERIAL_TENSOR,))[0]

    def take_at(self, step: int, tensors: Sequence[int]) -> torch.Tensor:
        """Claim the draws of several tensors at a step, as ``at(step, tensor).take()`` does each: int32 [k, 12].

        None is claimed where one was drawn before. Raises as `at` and its draws.
        """
        for tensor in (min(tensors), max(tensors)) if tensors else ():
            self.at(step, tensor)
        if len(set(tensors)) < len(tensors):
            raise ValueError(f"a tensor id was given twice for step {step}: a position is drawn once")
        return self.claim(step, tensors)

    def claim(self, step: int, tensors: Sequence[int]) -> torch.Tensor:
        """`take_at` of ids that are in range and differ."""
        with self._lock:
            if step < self._at_step:
                raise RuntimeError(
                    f"noise of step {step} was asked for after step {self._at_step}: "
                    "steps may not go back, or noise would repeat"
                )
            if step > self._at_step:
                self._at_step = step
                self._claimed.clear()
            known = self._claimed.intersection(tensors)
            if known:
                raise RuntimeError(
                    f"the noise of step {step}, tensor {min(known)} was already drawn: a position is drawn once"
                )
            self._claimed.update(tensors)
            return self._positions(step, tensors)

    def _positions(self, step: int, tensors: Sequence[int]) -> torch.Tensor:
        words = np.empty((len(tensors), POSITION_WORDS), np.uint32)
        words[:, :8] = self._key
        words[:, 8] = tensors
        words[:, 9:] = step & 0xFFFFFFFF, step >> 32, self.rounds // 2
        return torch.from_numpy(words.view(np.int32))

    def uniform64(self, n: int) -> np.ndarray:
        """``n`` independent integers, uniform on 0 .. 2^64 - 1: uint64 [n].

        Raises:
            ValueError: if n is negative or above 2^35.
        """
        if not 0 <= n <= MAX_ELEMENTS // 2:
            raise ValueError(f"the number of draws must be between 0 and 2^35, got {n}")
        blocks = -(-n // 8)
        words = np.empty(blocks * 16, dtype=np.uint32)
        position = self.take()
        _native.chacha_words(words, 0, blocks, position, native_threads(), "")
        return words.astype("<u4", copy=False).view("<u8")[:n]

    def bernoulli(self, n: int, probability: float) -> torch.Tensor:
        """``n`` independent draws, each true with ``probability``, exact to 2^-64: bool [n], on the CPU.

        Raises:
            ValueError: if the probability is not in [0, 1], or n is negative.
        """
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"the probability must be between 0 and 1, got {probability}")
        draws = self.uniform64(n)
        threshold = int(Fraction(probability) * (1 << 64))
        if threshold == 1 << 64:
            return torch.ones(n, dtype=torch.bool)
        return torch.from_numpy(draws < np.uint64(threshold))

    def permutation(self, n: int) -> torch.Tensor:
        """The numbers 0 .. n - 1 in an order uniform over all n! orders: int64 [n], on the CPU."""
        while True:
            draws = self.uniform64(n)
            order = np.argsort(draws)
            ranked = draws[order]
            # If no two draws are equal every order is equally likely; ties (probability n^2 / 2^65) are drawn anew.
            if not np.any(ranked[1:] == ranked[:-1]):
                return torch.from_numpy(order.astype(np.int64, copy=False))

    def __repr__(self) -> str:
        origin = "unsafe: reproducible from a seed" if self.reproducible else "keyed by the operating system"
        return f"NoiseStream(ChaCha{self.rounds}, {origin})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a NoiseStream cannot be copied, pickled or saved: noise that can be repeated protects nothing")

    def state_dict(self) -> NoReturn:
        """Raises TypeError: a stream has no state that may be saved; a resumed run makes a new one."""
        self.__reduce_ex__(2)


class Draw:
    """One position of a stream, to be passed to an op in the stream's place; it can be drawn once."""

    __slots__ = ("_stream", "step", "tensor")

    def __init__(self, stream: NoiseStream, step: int, tensor: int) -> None:
        self._stream = stream
        self.step = step
        self.tensor = tensor

    def take(self) -> torch.Tensor:
        """Claim the position: int32 [12], as ``NoiseStream.take``. Raises RuntimeError if it was drawn before."""
        return self._stream.claim(self.step, (self.tensor,))[0]

    def __repr__(self) -> str:
        return f"{self._stream!r}.at(step={self.step}, tensor={self.tensor})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self._stream.__reduce_ex__(2)


_streams: weakref.WeakSet[NoiseStream] = weakref.WeakSet()
_forked = False


def native_threads() -> int:
    """Threads for a kernel: torch's number; 1 in a forked process, where the OpenMP runtime's threads are missing."""
    return 1 if _forked else torch.get_num_threads()


def need_no_threads() -> None:
    """In a forked process, keep torch to one thread: its products would wait for the missing ones without end."""
    if _forked and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


def _rekey_in_child() -> None:
    global _forked
    _forked = True
    for stream in list(_streams):
        stream._lock = threading.Lock()
        if not stream.reproducible:
            stream._key = np.frombuffer(os.urandom(32), dtype=np.uint32).copy()


os.register_at_fork(after_in_child=_rekey_in_child)


def check_positions(positions: torch.Tensor, *count: int) -> None:
    """Refuse what is no position, int32 [12], or not ``count`` of them, [count, 12], all of one number of rounds of a stream."""
    shape = [*count, POSITION_WORDS]
    if positions.dtype != torch.int32 or [*positions.shape] != shape or not positions.is_contiguous():
        raise ValueError(
            f"positions are int32 {shape} that a NoiseStream gave out, got {positions.dtype} {[*positions.shape]}"
        )
    double_rounds = set(positions.view(-1)[POSITION_WORDS - 1 :: POSITION_WORDS].tolist())
    if len(double_rounds) > 1 or not _DOUBLE_ROUNDS.issuperset(double_rounds):
        raise ValueError(
            "positions are NoiseStream's: their last words are 10 double rounds of ChaCha for all, or 6, not "
            f"{sorted(double_rounds)}"
        )


def chacha_words(position: torch.Tensor, first: int, blocks: int, second: bool = False) -> np.ndarray:
    """The definition of the layout's words: uint32 [blocks, 16], the blocks from ``first`` on at ``position``.

    ``second`` sets the domain flag. RFC 8439, section 2.3, in numpy. Raises ValueError for a position of other rounds.
    """
    check_positions(position)
    at = position.cpu().numpy().view(np.uint32)
    state = np.empty((16, blocks), np.uint32)
    state[:4] = _CONSTANTS[:, None]
    state[4:12] = at[:8, None]
    state[12] = (first + np.arange(blocks, dtype=np.int64)).astype(np.uint32)
    state[13] = at[8] | _DOMAIN_FLAG if second else at[8]
    state[14:] = at[9:11, None]
    x = state.copy()
    columns = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
    diagonals = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
    for _ in range(at[11]):
        for a, b, c, d in (*columns, *diagonals):
            for target, source, other, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[target] += x[source]
                mixed = x[other] ^ x[target]
                x[other] = (mixed << np.uint32(bits)) | (mixed >> np.uint32(32 - bits))
    return np.ascontiguousarray((x + state).T)
