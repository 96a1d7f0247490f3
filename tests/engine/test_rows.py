"""Where rows lie, followed through a forward pass in which other sizes are those of the batch by chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fastdp.calls.flow import DataFlow
from fastdp.engine.capture.trace import Tracer
from fastdp.engine.uses.rows import RowAxes
from tests.cases import cases, pairs

SMALL = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11}


class Grouped(nn.Module):
    """A model that takes several sequences a row: ``[rows, group, tokens]``."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids.flatten(0, 1), attention_mask=torch.ones_like(ids.flatten(0, 1)))[0]


@pytest.fixture(scope="module", params=["gpt2", "llama", "bert"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    if request.param == "gpt2":
        return Grouped(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, vocab_size=11)))
    if request.param == "llama":
        return Grouped(LlamaForCausalLM(LlamaConfig(**SMALL)))
    return Grouped(BertModel(BertConfig(**SMALL), add_pooling_layer=False))


@cases(*pairs(("group", [1, 2, 3]), ("tokens", [2, 3, 4, 6, 8, 9])))
def test_texts_as_long_as_there_are_rows_leave_them_in_order(model: nn.Module, tokens: int, group: int) -> None:
    ids = torch.randint(0, 11, (4, group, tokens))
    trained = dict(model.named_parameters())
    found = Tracer(model, trained).trace(model.forward, ((ids,), {}), 4)
    assert found.conflict is None
    assert all(fold is None or fold.natural for fold in found.carries_rows.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 3), min_size=1, max_size=4), st.data())
def test_sums_and_broadcasts_know_where_rows_went(sizes: list[int], data: st.DataObject) -> None:
    # All sizes are 2 or 3, so that nothing can be told from a size.
    rows = sizes[axis := data.draw(st.integers(0, len(sizes) - 1))]
    begin = torch.arange(rows, dtype=torch.float64)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["mean", "amax", "add", "multiply"]))
            if kind in ("mean", "amax") and x.dim() > 1:
                keep = data.draw(st.booleans())
                dim = data.draw(st.integers(-x.dim(), x.dim() - 1))
                x = x.mean(dim, keepdim=keep) if kind == "mean" else x.amax(dim=dim, keepdim=keep)
            elif kind == "add":
                x = x + torch.zeros(data.draw(st.sampled_from([2, 3])), *x.shape, dtype=x.dtype)
            else:
                x = x * 1.0
        return x

    class Watch(DataFlow):
        def __init__(self) -> None:
            super().__init__([begin])
            self.row_axes = RowAxes([begin], rows)

        def follow(self, func, args, kwargs, given, out):  # type: ignore[no-untyped-def]
            super().follow(func, args, kwargs, given, out)
            self.row_axes.follow(func, args, kwargs, given, [out] if isinstance(out, torch.Tensor) else list(out))

    watch = Watch()
    with watch:
        start = begin.view(rows, *[1] * (len(sizes) - 1 - axis)).expand(sizes)
        end = run(start)
    place = watch.row_axes.of(end)
    if place is not None:
        # The entries are the numbers of their rows still, wherever rows were not averaged away.
        assert torch.equal(place.over(end.shape).double(), end)
