"""The stream: RFC 8439's vectors and those of 12 rounds, claims that never repeat, and keys that never leave."""

import copy
import io
import os
import pickle
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats

from fastdp import _native
from fastdp.ops import NoiseStream, add_noise_
from fastdp.ops.stream import CIPHER_ROUNDS, MAX_TENSORS, chacha_words
from tests.cases import cases, pairs


def position(key: bytes, nonce: bytes, rounds: int = 20) -> torch.Tensor:
    words = np.frombuffer(key + nonce, "<u4").astype(np.uint32)
    return torch.from_numpy(np.append(words, np.uint32(rounds // 2)).view(np.int32))


def native_words(at: torch.Tensor, first: int, blocks: int, isa: str) -> np.ndarray:
    out = np.zeros((blocks, 16), np.uint32)
    _native.chacha_words(out.ctypes.data, first, blocks, at.data_ptr(), 1, isa)
    return out


COUNTING = bytes(range(32))
# (key, nonce, counter, rounds, keystream) of RFC 8439, section 2.3.2 and appendix A.1, vector 5; and, of 12 rounds,
# TC8 of draft-strombergson-chacha-test-vectors-01.
VECTORS = [
    (
        COUNTING,
        "000000090000004a00000000",
        1,
        20,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32),
        "000000000000000000000002",
        0,
        20,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
    (
        bytes.fromhex("c46ec1b18ce8a878725a37e780dfb7351f68ed2e194c79fbc6aebee1a667975d"),
        "000000001ada31d5cf688221",
        0,
        12,
        "1482072784bc6d06b4e73bdc118bc0103c7976786ca918e06986aa251f7e9cc1"
        "b2749a0a16ee83b4242d2e99b08d7c20092b80bc466c87283b61b1b39d0ffbab",
    ),
]


@pytest.fixture(params=["reference", "portable", "avx2", "avx512"])
def words(request):
    if request.param == "reference":
        return chacha_words
    order = ["portable", "avx2", "avx512"]
    if order.index(request.param) > order.index(_native.isa()):
        pytest.skip(f"this processor lacks {request.param}")
    return lambda at, first, blocks: native_words(at, first, blocks, request.param)


@cases("key, nonce, counter, rounds, keystream", VECTORS)
def test_block_function(words, key, nonce, counter, rounds, keystream):
    block = words(position(key, bytes.fromhex(nonce), rounds), counter, 1)
    assert block.astype("<u4").tobytes().hex() == keystream


@cases(*pairs(("rounds", CIPHER_ROUNDS), ("blocks", [1, 7, 16, 17, 129, 2049])))
def test_words_are_those_of_the_definition_at_any_count(words, blocks, rounds):
    at = NoiseStream.unsafe_reproducible(1, rounds).take()
    first = (1 << 32) - blocks // 2 - 1  # the counter passes its last value and wraps
    np.testing.assert_array_equal(words(at, first, blocks), chacha_words(at, first, blocks))


def test_domain_flag_changes_the_block():
    at = NoiseStream.unsafe_reproducible(1).take()
    flagged = at.clone()
    flagged[8] |= -(1 << 31)
    np.testing.assert_array_equal(chacha_words(at, 0, 3, second=True), chacha_words(flagged, 0, 3))
    assert not (chacha_words(at, 0, 3, second=True) == chacha_words(at, 0, 3)).any()


def test_position_layout():
    seed = int.from_bytes(COUNTING, "little")
    at = NoiseStream.unsafe_reproducible(seed).at(step=(5 << 32) | 7, tensor=11).take()
    assert at.dtype == torch.int32
    assert at.numpy().view(np.uint32).tolist() == [*np.frombuffer(COUNTING, "<u4").tolist(), 11, 7, 5, 10]


@cases("rounds", CIPHER_ROUNDS)
def test_every_position_of_a_stream_has_its_rounds(rounds):
    streams = (
        NoiseStream(rounds),
        NoiseStream.shared(lambda: COUNTING, rounds),
        NoiseStream.unsafe_reproducible(3, rounds),
    )
    for stream in streams:
        taken = [stream.take(), stream.at(1, 2).take(), *stream.take_at(2, [0, 1])]
        assert [int(at[11]) for at in taken] == [rounds // 2] * 4
        assert f"(ChaCha{rounds}, " in repr(stream)
    assert NoiseStream().rounds == 20


@cases("rounds", [0, 8, 10, 6, 16, 24, -12, 12.5, "12", None])
def test_other_rounds_are_refused(rounds):
    for make in (NoiseStream, lambda rounds: NoiseStream.shared(lambda: COUNTING, rounds)):
        with pytest.raises(ValueError, match="20 here, or 12"):
            make(rounds)
    with pytest.raises(ValueError, match="20 here, or 12"):
        NoiseStream.unsafe_reproducible(1, rounds)


def test_every_stream_has_its_own_key():
    keys = {tuple(NoiseStream().take()[:8].tolist()) for _ in range(20)}
    assert len(keys) == 20


@given(st.lists(st.sampled_from(["take", "uniform", "bernoulli", "permutation", "at"]), max_size=30))
def test_no_position_is_claimed_twice(calls):
    class Recording(NoiseStream):
        __slots__ = ("seen",)

        def _positions(self, step, tensors):
            found = super()._positions(step, tensors)
            self.seen.extend(map(tuple, found.tolist()))
            return found

    stream = Recording()
    stream.seen = []
    for i, call in enumerate(calls):
        match call:
            case "take":
                stream.take()
            case "uniform":
                stream.uniform64(3)
            case "bernoulli":
                stream.bernoulli(3, 0.5)
            case "permutation":
                stream.permutation(3)
            case "at":
                stream.at(i // 4, i % 4).take()
    assert len(stream.seen) >= len(calls)
    assert len(set(stream.seen)) == len(stream.seen)


def test_threads_never_share_a_position():
    stream = NoiseStream()
    taken: list[tuple[int, ...]] = []

    def work():
        for _ in range(500):
            taken.append(tuple(stream.take().tolist()))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(set(taken)) == 2000


def test_a_draw_is_used_once():
    stream = NoiseStream()
    draw = stream.at(3, 5)
    add_noise_(torch.zeros(4), 1.0, draw)
    with pytest.raises(RuntimeError, match="step 3, tensor 5 was already drawn"):
        add_noise_(torch.zeros(4), 1.0, draw)
    with pytest.raises(RuntimeError, match="already drawn"):
        stream.at(3, 5).take()
    stream.at(3, 6).take()
    stream.at(4, 5).take()
    with pytest.raises(RuntimeError, match="steps may not go back"):
        stream.at(3, 7).take()


@cases("step, tensor", [(-1, 0), (1 << 64, 0), (0, -1), (0, MAX_TENSORS)])
def test_positions_out_of_range(step, tensor):
    with pytest.raises(ValueError, match="must be between"):
        NoiseStream().at(step, tensor)


@cases(
    *pairs(
        ("of", ["stream", "draw"]),
        (
            "leak",
            [
                copy.copy,
                copy.deepcopy,
                pickle.dumps,
                lambda s: torch.save(s, io.BytesIO()),
                lambda s: torch.save({"s": s}, io.BytesIO()),
            ],
        ),
    )
)
def test_the_key_cannot_be_copied_or_saved(leak, of):
    stream = NoiseStream()
    with pytest.raises(TypeError, match="cannot be copied, pickled or saved"):
        leak(stream if of == "stream" else stream.at(0, 0))


def test_state_dict_refuses():
    with pytest.raises(TypeError, match="cannot be copied, pickled or saved"):
        NoiseStream().state_dict()


def test_repr_hides_the_key():
    stream = NoiseStream()
    shown = f"{stream!r} {stream} {stream.at(0, 1)!r}"
    assert "keyed by the operating system" in shown
    for word in stream.take()[:8].numpy().view(np.uint32).tolist():
        assert str(word) not in shown
        assert f"{word:x}" not in shown
    assert "unsafe" in repr(NoiseStream.unsafe_reproducible(0))


def child_noise(stream: NoiseStream) -> tuple[bytes, bytes]:
    """The same draw in a forked child and in this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, stream.uniform64(8).tobytes())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        theirs = pipe.read()
    os.waitpid(child, 0)
    return theirs, stream.uniform64(8).tobytes()


def test_a_fork_does_not_repeat_the_noise():
    theirs, ours = child_noise(NoiseStream())
    assert len(theirs) == len(ours) == 64
    assert theirs != ours
    theirs, ours = child_noise(NoiseStream.unsafe_reproducible(3))
    assert theirs == ours


def test_a_fork_while_another_thread_draws_does_not_hang():
    stream = NoiseStream()
    with stream._lock:
        child = os.fork()
        if child == 0:
            stream.take()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@cases("seed", [-1, 1 << 256])
def test_seed_out_of_range(seed):
    with pytest.raises(ValueError, match="seed"):
        NoiseStream.unsafe_reproducible(seed)


def test_uniform64_is_the_key_stream():
    draws = NoiseStream.unsafe_reproducible(4).uniform64(13)
    words = chacha_words(NoiseStream.unsafe_reproducible(4).take(), 0, 2).reshape(-1)
    expected = [int(words[2 * i]) | int(words[2 * i + 1]) << 32 for i in range(13)]
    assert draws.tolist() == expected
    assert NoiseStream().uniform64(0).shape == (0,)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_bernoulli_compares_64_bits(n, probability):
    draws = NoiseStream.unsafe_reproducible(n).bernoulli(n, probability)
    uniform = NoiseStream.unsafe_reproducible(n).uniform64(n)
    numerator, denominator = float(probability).as_integer_ratio()
    # u / 2^64 < p in whole numbers; rounding p down to 64 bits may only move a draw that equals it
    exact = [u * denominator < (numerator << 64) // denominator * denominator for u in uniform.tolist()]
    assert draws.dtype == torch.bool
    assert draws.tolist() == exact


def test_bernoulli_rate():
    """A correct generator fails this for 2 keys in 10^6 at each rate (two-sided binomial tail)."""
    for probability in (1e-4, 0.3, 0.9999):
        hits = int(NoiseStream.unsafe_reproducible(5).bernoulli(1_000_000, probability).sum())
        assert stats.binomtest(hits, 1_000_000, probability).pvalue > 2e-6


@cases("probability", [-0.1, 1.1, float("nan")])
def test_bernoulli_refuses(probability):
    with pytest.raises(ValueError, match="probability"):
        NoiseStream().bernoulli(3, probability)
    with pytest.raises(ValueError, match="number of draws"):
        NoiseStream().bernoulli(-1, 0.5)


def test_permutation_is_uniform():
    """Chi-square over the 24 orders of 4 numbers: a correct generator fails for 1 key in 10^6."""
    stream = NoiseStream.unsafe_reproducible(6)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(4800):
        order = tuple(stream.permutation(4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6


@given(st.integers(0, 300))
def test_permutation_holds_each_number_once(n):
    assert sorted(NoiseStream().permutation(n).tolist()) == list(range(n))


def test_permutation_draws_again_after_a_tie(monkeypatch):
    stream = NoiseStream()
    answers = iter([np.array([5, 3, 5], np.uint64), np.array([9, 2, 4], np.uint64)])
    monkeypatch.setattr(NoiseStream, "uniform64", lambda self, n: next(answers))
    assert stream.permutation(3).tolist() == [1, 2, 0]
