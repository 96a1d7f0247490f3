"""``private_snap`` on processors: noisy rows from csrc/dchi.cpp, as ``snap`` asks for them."""

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
        rows = torch.empty(end - begin, d)
        _native.dchi_rows(
            table.data_ptr(),
            flat[begin:].data_ptr(),
            eta[stride * begin :].data_ptr(),
            stride,
            begin,
            end - begin,
            d,
            position.data_ptr(),
            rows.data_ptr(),
            native_threads(),
        )
        refuse_overflow(_native.survey(rows.data_ptr(), end - begin, d, native_threads())[0] < 0)
        return rows

    return search(noisy, flat.numel(), table, bits).view(ids.shape)
