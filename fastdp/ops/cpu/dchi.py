"""``private_snap`` and ``dchi_vectors`` on processors: noisy rows from csrc/dchi.cpp, as ``snap`` asks for them."""

from __future__ import annotations

import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.dchi import refuse_overflow
from fastdp.ops.stream import native_threads

from .snap import search, survey


def private_snap(ids: Tensor, table: Tensor, eta: Tensor, position: Tensor) -> Tensor:
    """:func:`fastdp.ops.private_snap` on a processor."""
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


def dchi_vectors(eta: Tensor, width: int, position: Tensor) -> Tensor:
    """:func:`fastdp.ops.dchi_vectors` on a processor: a row of zeros with noise."""
    eta = eta.contiguous()
    return _rows(torch.zeros(1, width), torch.zeros(eta.numel(), dtype=torch.int64), eta, 1, 0, position)


def _rows(table: Tensor, ids: Tensor, eta: Tensor, stride: int, first: int, position: Tensor) -> Tensor:
    """Rows ``ids`` of the table with the noise of tokens ``first`` and on, float32 [n, d]."""
    n, d = ids.numel(), table.shape[1]
    rows = torch.empty(n, d)
    _native.dchi_rows(table, ids, eta, stride, first, n, d, position, rows, native_threads())
    return rows
