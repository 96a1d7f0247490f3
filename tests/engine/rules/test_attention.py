"""Torch's own attention and transformer layers, in both layouts, against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.cases import cases
from tests.engine.rules.exact import assert_exact_layer

WIDTH, TOKENS = 8, 5


def _attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(WIDTH, 2, **{"batch_first": True, **options})


def _layer(kind: type[nn.Module] = nn.TransformerEncoderLayer, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(WIDTH, 2, 12, dropout=0.0, **{"batch_first": True, **options})


def _time_first(layer: nn.Module, *given: torch.Tensor, **options: Any) -> torch.Tensor:
    out = layer(*(x.transpose(0, 1) for x in given), **options)
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


def _causal(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS)
    out: torch.Tensor = layer(x, src_mask=mask.to(x), is_causal=True)
    return out


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "self": (_attention(), lambda m, x: m(x, x, x)[0]),
    "no weights": (_attention(bias=False), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "time first": (_attention(batch_first=False), lambda m, x: _time_first(m, x, x, x)),
    "time first, no weights": (_attention(batch_first=False), lambda m, x: _time_first(m, x, x, x, need_weights=False)),
    "cross": (_attention(), lambda m, x: m(x, x[:, :3], x[:, :3], need_weights=False)[0]),
    "three inputs": (_attention(), lambda m, x: m(x, x[:, :3], x[:, 1:4].sin())[0]),
    "separate weights": (_attention(kdim=3, vdim=5), lambda m, x: m(x, x[:, :3, :3], x[:, :3, :5])[0]),
    "a learned key and value": (_attention(add_bias_kv=True), lambda m, x: m(x, x, x)[0]),
    "a key of zeros": (_attention(add_zero_attn=True), lambda m, x: m(x, x, x, need_weights=False)[0]),
    "padding": (
        _attention(),
        lambda m, x: m(x, x, x, key_padding_mask=(torch.arange(TOKENS) > 3).expand(len(x), -1))[0],
    ),
    "encoder layer": (_layer(), lambda m, x: m(x)),
    "encoder layer, time first": (_layer(batch_first=False), lambda m, x: _time_first(m, x)),
    "encoder layer, norm first": (_layer(norm_first=True, activation="gelu", bias=False), _causal),
    "encoder": (lambda: nn.TransformerEncoder(_layer()(), 2), lambda m, x: m(x)),  # type: ignore[arg-type]
    "decoder layer": (_layer(nn.TransformerDecoderLayer), lambda m, x: m(x, x[:, :3])),
    "transformer, time first": (
        lambda: nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0),
        lambda m, x: _time_first(m, x, x[:, :3]),
    ),
}


@cases("name", CASES)
def test_torch_s_own_attention_is_exact_in_one_pass(name: str) -> None:
    build, call = CASES[name]
    rows = 2 + len(name) % 3
    x = torch.randn(rows, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rows))
    engine = assert_exact_layer(build(), x, call=call, two_pass=len(name) % 2 == 0)
    assert engine.route == "uses"
    assert set(engine.accumulator.sums) == set(engine.parameters)
