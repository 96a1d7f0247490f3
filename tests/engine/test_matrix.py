"""Norms and clipped sums against one-at-a-time autograd, on the models people use."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cases import cases
from tests.engine.models import MODELS, batch, build
from tests.engine.reference import Recording, engine_for, norms, one_at_a_time, relative, require_exact, stepped, ticket

#: The worst relative error allowed against float64, in float32 arithmetic.
TOLERANCE = 1e-5
#: How much less than its share a unit may get, because its norm is replaced by an upper bound.
BOUND = 2e-3

_NO_BIASES = {"llama", "mistral", "qwen3", "gemma3", "t5"}
_ROWS_FIRST_LABELS = {"bert", "roberta", "distilbert", "electra", "albert", "vit", "bert-mlm", "t5", "bart"}
CASES = [(name, tuning) for name in MODELS for tuning in ("full", "lora", "bitfit")]
CASES = [(n, t) for n, t in CASES if not (t == "bitfit" and n in _NO_BIASES)]
CASES += [(n, t) for n in ("gpt2", "llama") for t in ("bottleneck", "ia3", "prompt", "prefix", "dora")]


@pytest.mark.parametrize(("name", "tuning"), CASES)
def test_step_matches_one_example_at_a_time(name: str, tuning: str) -> None:
    model, data = build(name, tuning), batch(name)
    truth = _shifted_for_prompts(model, data, tuning, name not in _ROWS_FIRST_LABELS)
    sizes = norms(truth)
    bound = float(sizes.median())
    engine = stepped(model, data, bound)
    copy.deepcopy(model)  # would be refused if a forward had left something of the batch in it
    require_exact(engine, truth, TOLERANCE)
    assert bool(((1 - BOUND) * (bound / sizes).clamp(max=1) <= Recording.given[-1][0].double()).all())


def _shifted_for_prompts(
    model: torch.nn.Module, data: dict[str, torch.Tensor], tuning: str, shift: bool
) -> list[dict[str, torch.Tensor]]:
    if tuning != "prompt":
        return one_at_a_time(model, data, shift=shift)

    class Aligned(torch.nn.Module):
        """Soft prompts stand before the text, so the last of them predicts its first token."""

        def __init__(self, inner: torch.nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: torch.Tensor) -> object:
            output = self.inner(**inputs)
            output.logits = output.logits[:, -inputs["labels"].shape[1] - 1 : -1]
            return output

    gradients = one_at_a_time(Aligned(model), data, shift=False)
    return [{n.removeprefix("inner."): g for n, g in gradient.items()} for gradient in gradients]


@cases("length", [6, 40, 130])
def test_a_tied_head_stays_exact_when_a_later_batch_is_long(length: int) -> None:
    """From about twice the width on, a head's gradients are smaller than its factors; the table's never are."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 257, "n_positions": 160}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)).train()
    ids = torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(1))
    truth = norms(one_at_a_time(model, {"input_ids": ids, "labels": ids}, shift=True))
    engine, tickets = engine_for(model, 1e6)
    for tokens in (6, length):
        tickets.append(ticket(2, last=False))
        model(input_ids=ids[:, :tokens], labels=ids[:, :tokens]).loss.backward()
    assert engine.route == "uses", engine.reason
    assert relative(Recording.seen[-1][0], truth) < TOLERANCE
