"""Norms and clipped sums against one-at-a-time autograd, on the models people use."""

from __future__ import annotations

import copy

import pytest

from tests.engine.models import MODELS, batch, build
from tests.engine.reference import assert_exact_step

_NO_BIASES = {"llama", "mistral", "qwen3", "gemma3", "t5"}
CASES = [(n, t) for n in MODELS for t in ("full", "lora", "bitfit") if not (t == "bitfit" and n in _NO_BIASES)]
CASES += [(n, t) for n in ("gpt2", "llama") for t in ("bottleneck", "ia3", "prompt", "prefix", "dora")]
#: Models whose adapters or biases are no different for the engine wait for the slow tier.
_ALIKE = {"mistral", "qwen3", "gemma3", "opt", "gpt-neox", "bert-mlm", "roberta", "distilbert", "electra", "albert"}


@pytest.mark.parametrize(
    ("name", "tuning"),
    [pytest.param(n, t, marks=[pytest.mark.slow] if n in _ALIKE and t != "full" else []) for n, t in CASES],
)
def test_step_matches_one_example_at_a_time(name: str, tuning: str) -> None:
    engine = assert_exact_step(build(name, tuning), batch(name))
    copy.deepcopy(engine.model)  # would be refused if a forward had left something of the batch in it


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
@pytest.mark.parametrize("rows", [2, 4])
def test_texts_as_long_as_there_are_rows_leave_them_in_order(name: str, rows: int) -> None:
    assert_exact_step(build(name), batch(name, rows=rows, tokens=4))
