"""A public model draws replacements from answered types: the law it follows, and that it tells nothing more."""

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import chisquare
from transformers import GPT2Config, GPT2LMHeadModel

from fastdp import NoiseStream
from fastdp.methods.selective import SelectivePerturbation
from fastdp.methods.selective.infill import choose, infill
from tests.tokenizers_for_tests import quickstart

TYPES = torch.tensor([0, 1, 1, 2, 2, 2])
ALLOWED = (torch.arange(3)[:, None] == TYPES) & (torch.arange(6) > 0)
ALLOWED[0, 0] = True


def model(vocabulary=6, seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=48,
        n_embd=8,
        n_layer=1,
        n_head=2,
        initializer_range=0.8,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def conditional(net, prefix, answer, allowed=ALLOWED):
    """The law that a place with this answer has behind a prefix, from the definition."""
    logits = net(input_ids=torch.tensor([prefix])).logits[0, -1].double()
    return logits.masked_fill(~allowed[answer], -math.inf).softmax(0)


@torch.no_grad()
def test_each_place_follows_the_model_among_its_type():
    """Chi-square of 2,000 pairs of places, the second given the first: 1e-6 false alarms; the seed is fixed."""
    net, count = model(), 2_000
    answers = [[None, 1, None, 2]] * count
    found = torch.tensor(
        infill(net, [[3, 0, 1, 0]] * count, answers, ALLOWED, NoiseStream.unsafe_reproducible(1), begin=0)
    )
    assert bool((found[:, 0] == 3).all())
    assert bool((found[:, 2] == 1).all())
    first = conditional(net, [0, 3], 1)
    expected, seen = [], []
    for a, b in itertools.product((1, 2), (3, 4, 5)):
        expected.append(float(first[a] * conditional(net, [0, 3, a, 1], 2)[b]))
        seen.append(int(((found[:, 1] == a) & (found[:, 3] == b)).sum()))
    assert sum(seen) == count
    assert chisquare(seen, [count * p for p in expected]).pvalue > 1e-6


def test_tokens_of_one_type_give_the_same_text_to_the_bit():
    """One stream, texts that differ in a private token alone, of the same type: the same answers, and the same draws."""
    tokenizer, _ = quickstart()
    net = model(len(tokenizer))
    releases = SelectivePerturbation(3.0, "typed", replacement="model").open(net, tokenizer=tokenizer)
    cells = releases._mechanism()
    of_type = (cells.types == int(cells.types[cells.candidates][40])).nonzero().flatten().tolist()
    found = []
    for token in of_type[:6]:
        ids, private = [7, token, 9, token, 12, 30], [False, True, False, True, False, True]
        found.append(releases._draw([ids], [private], cells, NoiseStream.unsafe_reproducible(5)))
    assert len(of_type) >= 6
    assert all(own == found[0] for own in found)


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True))
def test_only_allowed_tokens_are_chosen(seed, fraction):
    generator = torch.Generator().manual_seed(seed)
    logits = 30 * torch.randn(4, 9, generator=generator)
    allowed = torch.rand(4, 9, generator=generator) < 0.4
    allowed[:, seed % 9] = True
    chosen = choose(logits, allowed, torch.full((4,), fraction, dtype=torch.float64))
    assert bool(allowed.gather(1, chosen[:, None]).all())


def test_an_adapter_is_left_out_and_training_goes_on():
    peft = pytest.importorskip("peft")
    net = model()
    args = ([[0, 3, 0]] * 50, [[1, None, 2]] * 50, ALLOWED)
    plain = infill(net, *args, NoiseStream.unsafe_reproducible(2), begin=0)
    adapted = peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    adapted.train()
    fixed = [p for name, p in adapted.named_parameters() if "lora_A" in name]
    for parameter in fixed:
        parameter.requires_grad_(False)
    for module in adapted.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert infill(adapted, *args, NoiseStream.unsafe_reproducible(2), begin=0) == plain
    assert adapted.training
    assert fixed
    assert not any(parameter.requires_grad for parameter in fixed)
    assert any(p.requires_grad for name, p in adapted.named_parameters() if "lora_B" in name)


def test_without_a_first_token_the_first_place_is_drawn_evenly():
    found = infill(model(), [[0]] * 6000, [[2]] * 6000, ALLOWED, NoiseStream.unsafe_reproducible(3))
    assert chisquare(torch.tensor(found).flatten().bincount(minlength=6)[3:].numpy()).pvalue > 1e-6


def test_refusals():
    tokenizer, table = quickstart()
    with pytest.raises(ValueError, match="give the public model"):
        SelectivePerturbation(2.0, "typed", replacement="model").open(table, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="set mechanism='typed'"):
        SelectivePerturbation(2.0, replacement="model")
    with pytest.raises(ValueError, match="take the tokenizer's own"):
        infill(model(5), [[0, 3, 0]], [[None, 1, 2]], ALLOWED, NoiseStream(), begin=0)
