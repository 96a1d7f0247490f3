"""Norms, clipped sums and one full step against one-at-a-time autograd, on the models people use."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cases import cases
from tests.engine.models import MODELS, batch, build
from tests.engine.reference import Recording, engine_for, norms, one_at_a_time, relative, stepped, ticket

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
    model = build(name, tuning)
    data = batch(name)
    shift = name not in _ROWS_FIRST_LABELS
    truth = _shifted_for_prompts(model, data, tuning, shift)
    sizes = norms(truth)
    bound = float(sizes.median())
    plain = copy.deepcopy(model)

    engine = stepped(model, data, bound)
    copy.deepcopy(model)  # would be refused if a forward had left something of the batch in it

    assert engine.route == "uses", engine.reason
    assert relative(Recording.seen[-1][0], sizes) < TOLERANCE
    scales = Recording.given[-1][0].double()
    exact = (bound / sizes).clamp(max=1)
    assert bool(((1 - BOUND) * exact <= scales).all())
    assert bool((scales <= exact).all())
    sums = engine.accumulator.sums
    expected = {n: sum(s * g[n] for s, g in zip(scales, truth)) for n in truth[0]}
    total = torch.cat([expected[n].reshape(-1).expand(p.numel()) for n, p in _trained(plain)])
    got = torch.cat([sums[n].reshape(-1) if n in sums else torch.zeros(p.numel()) for n, p in _trained(plain)])
    assert relative(got, total) < TOLERANCE

    optimizer = torch.optim.SGD([p for _, p in _trained(model)], lr=0.5)
    for n, p in _trained(model):
        p.grad = sums[n] / len(sizes) if n in sums else torch.zeros_like(p)
    optimizer.step()
    for (n, after), (_, before) in zip(_trained(model), _trained(plain)):
        step = before.double() - 0.5 * expected[n] / len(sizes)
        assert torch.allclose(after.double(), step, rtol=1e-5, atol=1e-6), n


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


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


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
