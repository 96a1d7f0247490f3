"""Factors of made-up uses, their gradients one unit at a time in float64, and the error each op is allowed."""

import torch

from fastdp.ops import NoiseStream

#: Units of odd lengths; the second and the last are empty.
RAGGED = (7, 0, 1, 65, 4, 129, 16, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stream(seed: int = 1) -> NoiseStream:
    """One that repeats itself."""
    return NoiseStream.unsafe_reproducible(seed)


def offsets_of(lengths) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(list(lengths), dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)


def factor(tokens: int, columns: int, seed: int, dtype: torch.dtype = torch.float32, layout: str = "plain"):
    """A random matrix: plain, with padded rows, transposed in memory, or every other column of a wider one."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tokens, columns, generator=generator).to(dtype)
    if layout == "plain":
        return values
    if layout == "rows":
        held = torch.full((tokens, columns + 5), float("nan"), dtype=dtype)[:, 2 : 2 + columns]
    elif layout == "transposed":
        held = torch.full((columns, tokens + 3), float("nan"), dtype=dtype).T[:tokens]
    else:
        held = torch.full((tokens, 2 * columns), float("nan"), dtype=dtype)[:, ::2]
    held.copy_(values)
    return held


def gradients(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """[B, m, n] in float64, each unit a plain sum of outer products."""
    bounds = offsets.tolist()
    if left.dim() == 1:
        left = torch.nn.functional.one_hot(left, rows)
    left, right = left.double(), right.double()
    return torch.stack([left[a:b].T @ right[a:b] for a, b in zip(bounds, bounds[1:])])


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error against the entry's own size; where the truth is 0 the answer must be 0."""
    got, zero = got.double(), truth == 0
    assert torch.equal(got[zero], truth[zero])
    assert bool(torch.isfinite(got).all())
    return float(((got - truth).abs() / truth.abs())[~zero].max()) if not bool(zero.all()) else 0.0


def by_threads(compute):
    """What a function of nothing returns on one, two and three threads, which must be the same to the last bit."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(compute())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]
