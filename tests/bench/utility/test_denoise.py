"""Split-and-denoise: what leaves is noisy where text is, and the denoiser brings back some of what the noise took."""

import pytest
import torch
from transformers import BertConfig, BertModel

pytest.importorskip("matplotlib")

from fastdp.bench.utility import denoise
from fastdp.bench.utility.tops import Texts

from fastdp.ops.stream import NoiseStream


def made(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator)
    mask = (torch.arange(10) < lengths[:, None]).long()
    return Texts(torch.randint(3, 40, (count, 10), generator=generator) * mask, mask, torch.zeros(count).long())


@pytest.fixture
def embedder():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=0.5,
    )
    return denoise.Embedder(BertModel(config), NoiseStream.unsafe_reproducible(3))


def test_noise_is_on_the_tokens_of_text_alone(embedder):
    texts = made(20, 0)
    sent, clean = embedder.send(texts, 2.0), embedder.send(texts, None)
    width = int(texts.mask.sum(1).max())
    ends = torch.nn.functional.one_hot(texts.mask.sum(1) - 1, width).bool()
    inner = texts.mask[:, :width].bool() & ~ends
    inner[:, 0] = False
    assert torch.equal(sent.noise.abs().sum(-1) > 0, inner)
    assert not clean.noise.any()
    assert torch.equal(clean.guessed(embedder.table)[inner], texts.ids[:, :width][inner])
    # Gamma(24, 1 / 2) has a mean of 12 and a deviation of 2.4; of some 70 rows the mean lies within 2 but for one in 10^11.
    assert abs(float(sent.noise[inner].norm(dim=-1).mean()) - 12) < 2
    one = embedder.encoder(input_ids=texts.ids[:1, : texts.mask[0].sum()]).last_hidden_state.mean(1)
    assert torch.allclose(clean.returned[:1], one, atol=1e-5)


def test_a_trained_denoiser_is_nearer_to_the_truth(embedder):
    eta, held_out = 3.0, made(64, 1)
    denoiser = denoise.trained(embedder, made(256, 0), eta, 100, seed=0)
    sent, truth = embedder.send(held_out, eta), embedder.send(held_out, None).returned
    error, noisy = (float((rows - truth).square().mean()) for rows in (denoiser(sent), sent.returned))
    assert error < 0.9 * noisy
