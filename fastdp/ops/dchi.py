"""The d_chi (multivariate Laplace) mechanism on a public table: ``private_snap``.

Layout of its randomness, shared by every implementation. Token i of the flattened ids draws from one position:

* block ``D i + b``, ``D = ceil(d / 16)``: normals ``16 b .. 16 b + 15`` of the token (``stream.py``), its direction;
* block ``2^32 - 1 - (16 i + a)``: attempt a, of 16, at its radius. With u0, u1, u2 the 64-bit uniforms of the block's
  words (0, 1), (2, 3), (4, 5), low word first: ``sqrt(-2 ln u0) cos(2 pi u1)`` is the normal and u2 the uniform of
  Marsaglia and Tsang's method.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.noise import check_position, standard_normals
from fastdp.ops.snap import SNAP, check_table, refuse_non_finite, search, survey
from fastdp.ops.stream import Draw, NoiseStream, chacha_words, native_threads
from fastdp.ops.table import Op, check_tensors

_ATTEMPTS = 16
_COUNTERS = 1 << 32
#: Of eta to the width, so that noise stays within float32.
_LEAST_RATE = 2.0**-100


def check_token_ids(ids: Tensor, table: Tensor) -> None:
    """Raise TypeError, ValueError or IndexError unless these are int64 indices of the table's rows."""
    check_table(table)
    if ids.dtype != torch.int64:
        raise TypeError(f"ids are {ids.dtype}: they must be int64")
    if ids.numel():
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= table.shape[0]:
            raise IndexError(f"id {low if low < 0 else high} is outside the table of {table.shape[0]} rows")


def as_float64(value: float | Tensor, ids: Tensor) -> Tensor:
    """``value``, a number or a tensor, as float64 where the ids are."""
    return torch.as_tensor(value, dtype=torch.float64, device=ids.device).detach()


def check_per_token(name: str, value: Tensor, ids: Tensor, positive: bool) -> None:
    """Raise ValueError unless this is one number, or one for each id, and all are finite and above (or at least) 0."""
    if value.dim() and value.shape != ids.shape:
        raise ValueError(
            f"{name} has shape {list(value.shape)}: it must be a number, or one for each of {list(ids.shape)}"
        )
    good = torch.isfinite(value) & (value > 0 if positive else value >= 0)
    if not bool(good.all()):
        wrong = float(value[~good].flatten()[0])
        raise ValueError(f"{name} must be finite and {'above' if positive else 'at least'} 0, got {wrong}")


def _check_private_snap(ids: Tensor, table: Tensor, eta: Tensor, position: Tensor | NoiseStream | Draw) -> None:
    check_token_ids(ids, table)
    check_position(position)
    check_per_token("eta", eta, ids, positive=True)
    if table.shape[1] == 0:
        raise ValueError("the table's rows are empty: no direction to add noise in")
    if ids.numel() * (-(-table.shape[1] // 16) + _ATTEMPTS) > _COUNTERS:
        raise ValueError(f"{ids.numel()} tokens of width {table.shape[1]} are more than one position has noise for")


def uniforms(words: np.ndarray) -> np.ndarray:
    """64-bit uniforms on (0, 1], float64 [..., k], of words [..., 2 k], low word first."""
    return (np.ascontiguousarray(words).astype("<u4", copy=False).view("<u8").astype(np.float64) + 0.5) * 2.0**-64


def gamma_variates(position: Tensor, n: int, shape: float) -> np.ndarray:
    """The definition of the radii: independent Gamma(shape, 1), shape >= 1, of tokens 0 .. n - 1, float64 [n].

    Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000).
    """
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    words = chacha_words(position, _COUNTERS - _ATTEMPTS * n, _ATTEMPTS * n)[::-1].reshape(n, _ATTEMPTS, 16)
    u = uniforms(words[..., :6])
    x = np.sqrt(-2 * np.log(u[..., 0])) * np.cos(2 * np.pi * u[..., 1])
    v = np.maximum(1 + c * x, 0.0) ** 3
    with np.errstate(divide="ignore", invalid="ignore"):
        accepted = (v > 0) & (np.log(u[..., 2]) < 0.5 * x * x + d - d * v + d * np.log(v))
    first = np.where(accepted.any(1), accepted.argmax(1), _ATTEMPTS - 1)
    return d * v[np.arange(n), first]


def dchi_noise(position: Tensor, n: int, d: int) -> Tensor:
    """The definition of the noise for eta = 1: float64 [n, d], of density proportional to exp(-||noise||)."""
    width = 16 * -(-d // 16)
    z = standard_normals(position, n * width).reshape(n, width)[:, :d].float().double()
    return z * (torch.from_numpy(gamma_variates(position, n, float(d))) / z.norm(dim=1))[:, None]


def _private_snap_reference(ids: Tensor, table: Tensor, eta: Tensor, position: Tensor) -> Tensor:
    refuse_non_finite("table", table)
    noise = dchi_noise(position, ids.numel(), table.shape[1]).to(table.device)
    noise /= eta.expand(ids.shape).reshape(-1, 1)
    noisy = table.float()[ids.reshape(-1)] + noise.float()
    refuse_overflow(bool(torch.isfinite(noisy).all()))
    return SNAP.reference(noisy, table.float()).view(ids.shape)


def refuse_overflow(finite: bool) -> None:
    """Raise ValueError unless the noisy rows are ``finite``."""
    if not finite:
        raise ValueError("eta is so small that the noise is beyond float32: the answer would not depend on the table")


PRIVATE_SNAP = Op(
    "private_snap(Tensor ids, Tensor table, Tensor eta, Tensor position) -> Tensor",
    reference=_private_snap_reference,
    fake=lambda ids, *_: torch.empty_like(ids, memory_format=torch.contiguous_format),
    check=_check_private_snap,
)
PRIVATE_SNAP.in_family("dchi")


def _vectors_reference(eta: Tensor, width: int, position: Tensor) -> Tensor:
    return (dchi_noise(position, eta.numel(), width).to(eta.device) / eta[:, None]).float()


def _check_vectors(eta: Tensor, width: int, position: Tensor | NoiseStream | Draw) -> None:
    if eta.dim() != 1 or eta.dtype != torch.float64:
        raise ValueError(f"eta is {eta.dtype} {list(eta.shape)}: it must be float64, one for each vector")
    if width < 1:
        raise ValueError(f"width is {width}: it must be at least 1, or there is no direction to add noise in")
    check_per_token("eta", eta, eta, positive=True)
    # The longest vector that 16 attempts can give is below 2^7 width / eta.
    if eta.numel() and float(eta.min()) < width * _LEAST_RATE:
        raise ValueError(f"eta is {float(eta.min()):g}: with width {width} it must be at least {width * _LEAST_RATE:g}")
    check_position(position)
    if eta.numel() * (-(-width // 16) + _ATTEMPTS) > _COUNTERS:
        raise ValueError(f"{eta.numel()} vectors of width {width} are more than one position has noise for")


DCHI_VECTORS = Op(
    "dchi_vectors(Tensor eta, int width, Tensor position) -> Tensor",
    reference=_vectors_reference,
    fake=lambda eta, width, position: eta.new_empty(eta.numel(), width, dtype=torch.float32),
    check=_check_vectors,
)
DCHI_VECTORS.in_family("dchi")


def dchi_vectors(eta: Tensor, width: int, stream: NoiseStream | Draw) -> Tensor:
    """Independent vectors float32 [N, width] of noise, of density proportional to ``exp(-eta_i ||noise||)``; eta is float64 [N].

    What `private_snap` adds to the rows of its tokens, for rows that leave without being snapped.
    """
    return DCHI_VECTORS(eta, width, stream)


def private_snap(ids: Tensor, table: Tensor, eta: float | Tensor, stream: NoiseStream | Draw) -> Tensor:
    """Replace each token by the row nearest to its own row plus noise: the d_chi (multivariate Laplace) mechanism.

    The noise of a token is ``r u``: u uniform on the sphere and one ``r ~ Gamma(d, 1 / eta)`` a token. Its density is
    proportional to ``exp(-eta ||noise||)`` (Feyisetan et al., WSDM 2020, section 2.6; text privatization in the SAP paper).
    With one eta for all, replacing a token by another changes the law of its output by a factor of at most
    ``exp(eta * distance of their rows)``. The nearest row of a public table is post-processing. **Where eta depends
    on the token itself that bound does not hold.** The mean of r is ``d / eta``: in high dimension tokens change from
    never to always over a narrow range of eta, so report the share left unchanged beside eta.

    A token's randomness depends on the stream and its place among the flattened ids alone, not on threads or tiles.
    Rows and noise are float32; the nearest row is exact (see ``snap``), equal rows answer with the lowest index.

    Args:
        ids: int64, any shape, rows of the table; where they are elsewhere, they and the answer are moved.
        table: [V, d], float32 (16-bit tables are widened), d >= 1; must not itself depend on private data.
        eta: in units of 1 / distance, above 0: a number, or a tensor of the shape of ``ids``.
        stream: a ``NoiseStream`` or one position of it; never the generator that made the table.

    Returns:
        int64, of the shape of ``ids``.

    Raises:
        IndexError: an id outside the table.
        ValueError: eta that is not above 0 and finite, or so small that noise overflows; wrong shapes or devices; an
            empty table, or one with a row that holds a NaN or an infinity.
        TypeError: wrong dtypes, or no stream.
        RuntimeError: the position was drawn before.

    >>> table = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 9.0]])
    >>> private_snap(torch.tensor([2, 0, 1]), table, 1e6, NoiseStream())  # hardly any noise
    tensor([2, 0, 1])
    """
    check_tensors(ids=ids, table=table)
    there = ids.to(table.device)
    return PRIVATE_SNAP(there, table, as_float64(eta, there), stream).to(ids.device)


# On processors: noisy rows from csrc/dchi.cpp, as `snap` asks for them.


@PRIVATE_SNAP.on_cpu
def _private_snap_on_cpu(ids: Tensor, table: Tensor, eta: Tensor, position: Tensor) -> Tensor:
    table = table.detach().float().contiguous()
    bits = survey("table", table)
    flat, eta = ids.reshape(-1).contiguous(), eta.reshape(-1).contiguous()
    stride = int(eta.numel() > 1)
    d = table.shape[1]

    def noisy(begin: int, end: int) -> Tensor:
        rows = _rows(table, flat[begin:end], eta[stride * begin :], stride, begin, position)
        refuse_overflow(_native.survey(rows, end - begin, d, native_threads())[0] < 0)
        return rows

    return search(noisy, flat.numel(), table, bits).view(ids.shape)


@DCHI_VECTORS.on_cpu
def _dchi_vectors_on_cpu(eta: Tensor, width: int, position: Tensor) -> Tensor:
    """`fastdp.ops.dchi_vectors` on a processor: a row of zeros with noise."""
    eta = eta.contiguous()
    return _rows(torch.zeros(1, width), torch.zeros(eta.numel(), dtype=torch.int64), eta, 1, 0, position)


def _rows(table: Tensor, ids: Tensor, eta: Tensor, stride: int, first: int, position: Tensor) -> Tensor:
    """Rows ``ids`` of the table with the noise of tokens ``first`` and on, float32 [n, d]."""
    n, d = ids.numel(), table.shape[1]
    rows = torch.empty(n, d)
    _native.dchi_rows(table, ids, eta, stride, first, n, d, position, rows, native_threads())
    return rows
