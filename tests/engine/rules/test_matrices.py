"""Matrices that are read in other ways than by a linear layer, or made of parameters, against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.cases import cases
from tests.engine.rules.exact import assert_exact_layer

TOKENS, WIDTH, OUT = 5, 6, 4


def _parameters(**shapes: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(0.4 * torch.randn(shape)))
    return module


def _heads_back(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(0, (2, -1)).transpose(0, 1)


def _rows_back(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(0, (-1, TOKENS))


def _time_back(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(0, (TOKENS, -1)).transpose(0, 1)


#: What a layer's parameters are, and how they are applied to x [rows, TOKENS, WIDTH].
USES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "x @ W.t()": ({"w": (OUT, WIDTH)}, lambda m, x: x @ m.w.t()),
    "x @ W.T of a pooled x": ({"w": (OUT, WIDTH)}, lambda m, x: x.mean(1) @ m.w.T),
    "W @ x": ({"w": (OUT, TOKENS)}, lambda m, x: m.w @ x),
    "W @ x, rows last": ({"w": (OUT, WIDTH)}, lambda m, x: (m.w @ x[:, 0].t()).t()),
    "matmul then transposed": ({"w": (WIDTH, OUT)}, lambda m, x: torch.matmul(x, m.w).mT),
    "einsum": ({"w": (OUT, WIDTH)}, lambda m, x: torch.einsum("bti,oi->bto", x, m.w)),
    "einsum, W first": ({"w": (OUT, WIDTH)}, lambda m, x: torch.einsum("oi,bti->bot", m.w, x)),
    "einsum of heads": ({"w": (WIDTH, 2, 3)}, lambda m, x: torch.einsum("btd,dhk->bthk", x, m.w)),
    "einsum out of heads": (
        {"w": (2, 3, OUT)},
        lambda m, x: torch.einsum("bthk,hko->bto", x.unflatten(2, (2, 3)), m.w),
    ),
    "einsum a head": ({"w": (2, 3, 3)}, lambda m, x: torch.einsum("bthi,hij->bthj", x.unflatten(2, (2, 3)), m.w)),
    "einsum of two inputs": ({"w": (WIDTH, WIDTH)}, lambda m, x: torch.einsum("bti,ij,bsj->bts", x, m.w, x)),
    "bmm": (
        {"w": (3, 2, OUT)},
        lambda m, x: _rows_back(torch.bmm(x.view(-1, 3, 2).transpose(0, 1), m.w).transpose(0, 1)),
    ),
    "matmul by heads": ({"w": (2, 3, 3)}, lambda m, x: x.unflatten(2, (2, 3)).transpose(1, 2) @ m.w),
    "addmm": ({"w": (WIDTH, OUT), "b": (OUT,)}, lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w).view(len(x), -1)),
    "baddbmm": ({"w": (WIDTH, OUT)}, lambda m, x: torch.baddbmm(x[:, :, :OUT], x, m.w.expand(len(x), -1, -1))),
    "rows of W": ({"w": (7, WIDTH)}, lambda m, x: F.linear(x, m.w[2:5])),
    "columns of W": ({"w": (OUT, 9)}, lambda m, x: F.linear(x, m.w[:, 1:7])),
    "W twice, in parts": ({"w": (7, WIDTH)}, lambda m, x: F.linear(x, m.w[:3]) * F.linear(x, m.w[4:])),
    "W as it is and transposed": ({"w": (WIDTH, WIDTH)}, lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w.t())),
    "index_select": ({"w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.w.index_select(0, torch.tensor([2, 0, 2])))),
    "chunks": ({"w": (6, WIDTH)}, lambda m, x: sum(F.linear(x, part) for part in m.w.chunk(3))),
    "a concatenation": ({"v": (2, WIDTH), "w": (3, WIDTH)}, lambda m, x: F.linear(x, torch.cat([m.v, m.w]))),
    "columns joined": ({"v": (OUT, 2), "w": (OUT, 4)}, lambda m, x: F.linear(x, torch.cat([m.v, m.w], dim=1))),
    "2 W": ({"w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.w * 2.5)),
    "W over a root": ({"w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.w / WIDTH**0.5)),
    "V + W": ({"v": (OUT, WIDTH), "w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.v + m.w)),
    "A B": ({"a": (OUT, 2), "b": (2, WIDTH)}, lambda m, x: F.linear(x, m.a @ m.b)),
    "W + s A B": (
        {"w": (OUT, WIDTH), "a": (OUT, 2), "b": (2, WIDTH)},
        lambda m, x: F.linear(x, m.w + 0.5 * (m.a @ m.b)),
    ),
    "W V": ({"v": (5, WIDTH), "w": (OUT, 5)}, lambda m, x: F.linear(x, F.linear(m.w, m.v.t()))),
    "weight norm": (
        {"g": (OUT, 1), "v": (OUT, WIDTH)},
        lambda m, x: F.linear(x, m.g * m.v / m.v.norm(dim=1, keepdim=True)),
    ),
    "softmax of W": ({"w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.w.softmax(-1))),
    "a masked W": ({"w": (OUT, WIDTH)}, lambda m, x: F.linear(x, m.w * torch.ones(OUT, WIDTH).tril())),
    "a matrix exponential": ({"w": (WIDTH, WIDTH)}, lambda m, x: F.linear(x, torch.matrix_exp(m.w - m.w.t()))),
    "one of several": ({"w": (3, OUT, WIDTH)}, lambda m, x: F.linear(x, m.w[1])),
    "a derived bias": ({"w": (OUT, WIDTH), "b": (OUT,)}, lambda m, x: F.linear(x, m.w, m.b.exp())),
    "bilinear": ({"w": (OUT, WIDTH, WIDTH), "b": (OUT,)}, lambda m, x: F.bilinear(x, x.flip(1), m.w, m.b)),
    "an outer product": ({"u": (OUT,), "v": (WIDTH,)}, lambda m, x: F.linear(x, torch.outer(m.u, m.v))),
    "queries": ({"q": (3, WIDTH), "w": (WIDTH, WIDTH)}, lambda m, x: (F.linear(m.q, m.w) @ x.mT).softmax(-1) @ x),
    "queries, one a row": (
        {"q": (3, WIDTH), "w": (WIDTH, WIDTH)},
        lambda m, x: F.scaled_dot_product_attention(F.linear(m.q, m.w).expand(len(x), -1, -1), x, x),
    ),
    "a hypernetwork": (
        {"e": (1, 3), "w": (OUT * WIDTH, 3)},
        lambda m, x: F.linear(x, F.linear(m.e, m.w).view(OUT, WIDTH)),
    ),
    "repeated": ({"b": (1, WIDTH), "w": (OUT, WIDTH)}, lambda m, x: F.linear(x + m.b.repeat(TOKENS, 1), m.w)),
    "repeated for rows": (
        {"b": (WIDTH,), "w": (OUT, WIDTH)},
        lambda m, x: F.linear(torch.cat([x, m.b.repeat(len(x), 1, 1)], 1), m.w),
    ),
    "heads first": (
        {"w": (WIDTH, WIDTH), "b": (3,)},
        lambda m, x: _heads_back(F.linear(x, m.w).unflatten(2, (2, 3)).permute(2, 0, 1, 3).flatten(0, 1) + m.b),
    ),
    "time first": (
        {"w": (OUT, WIDTH), "b": (OUT,)},
        lambda m, x: (F.linear(x.transpose(0, 1), m.w) + m.b).transpose(0, 1),
    ),
    "time first, flattened": (
        {"w": (OUT, WIDTH), "b": (OUT,)},
        lambda m, x: _time_back(F.linear(x.transpose(0, 1).flatten(0, 1), m.w, m.b) * m.b),
    ),
    "a mix of layers": (
        {"s": (3,), "w": (WIDTH, WIDTH)},
        lambda m, x: (torch.stack([x, F.linear(x, m.w), x**2]) * m.s.softmax(0).view(3, 1, 1, 1)).sum(0),
    ),
    "a scale and a shift of tokens": ({"s": (WIDTH,), "b": (WIDTH,)}, lambda m, x: m.s * x + m.b),
    "a shift of pooled tokens": ({"b": (WIDTH,)}, lambda m, x: torch.add(m.b, x.mean(1))),
    "a scale": ({"s": (), "w": (OUT, WIDTH)}, lambda m, x: m.s.exp() * F.linear(x, m.w)),
}


@cases(
    "name, rows, two_pass", [(name, rows, rows in (2, 5)) for at, name in enumerate(USES) for rows in (1 + at % 3, 5)]
)
def test_every_use_of_a_matrix_is_exact_in_one_pass(name: str, rows: int, two_pass: bool) -> None:
    shapes, call = USES[name]
    x = torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rows))
    engine = assert_exact_layer(_parameters(**shapes), x, call=call, two_pass=two_pass)
    assert engine.route == "uses"
    assert set(engine.accumulator.sums) == set(engine.parameters)
