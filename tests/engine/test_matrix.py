"""Norms and clipped sums against one-at-a-time autograd, on the models people use."""

from __future__ import annotations

import copy

import pytest

from tests.engine.models import MODELS, batch, build
from tests.engine.reference import Recording, norms, require_exact, stepped
from tests.engine.runs import one_by_one

#: The worst relative error allowed against float64, in float32 arithmetic.
TOLERANCE = 1e-5
#: How much less than its share a unit may get, because its norm is replaced by an upper bound.
BOUND = 2e-3

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
    model, data = build(name, tuning), batch(name)
    truth = one_by_one(model, data)
    sizes = norms(truth)
    bound = float(sizes.median())
    engine = stepped(model, data, bound)
    copy.deepcopy(model)  # would be refused if a forward had left something of the batch in it
    require_exact(engine, truth, TOLERANCE)
    assert bool(((1 - BOUND) * (bound / sizes).clamp(max=1) <= Recording.given[-1][0].double()).all())
