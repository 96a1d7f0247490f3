"""Private releases as modules: exactly those of EWFT and TextPrivatizer, with their ledger and card."""

import pytest
import torch
from torch import nn

import fastdp
import fastdp.ops as ops
from fastdp.accounting import verify
from fastdp.methods import ewft
from fastdp.ops import NoiseStream
from tests.engine.models import batch, build

ROWS, TOKENS, WIDTH = 6, 4, 8


class Users(nn.Module):
    """A model of somebody's own, with the layer inside."""

    def __init__(self, **settings):
        super().__init__()
        self.table = nn.Embedding(30, WIDTH)
        self.noisy = fastdp.nn.NoisyHidden(sequence_length=TOKENS, dataset_size=ROWS, **settings)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids, records=None):
        mask = (ids != 0).long()
        return self.head(self.noisy(self.table(ids), attention_mask=mask, example_ids=records).mean(1))


def ids():
    return torch.randint(1, 30, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))


def test_a_release_is_the_clip_and_the_noise_of_the_schedule():
    noise = ewft.dp_forward(2, 8.0, 1e-5)
    layer = fastdp.nn.NoisyHidden(noise=noise, sequence_length=TOKENS, dataset_size=ROWS, max_norm=0.5, unsafe_seed=3)
    hidden = torch.randn(ROWS, TOKENS, WIDTH)
    mask = torch.ones(ROWS, TOKENS)
    mask[0, 2:] = 0
    layer.releases.set_epoch(1)
    found = layer(hidden, attention_mask=mask, example_ids=torch.arange(ROWS))
    stream = NoiseStream.unsafe_reproducible(3)
    expected = ops.clip_noise(hidden * mask[:, :, None], 0.5, 0.5 * noise.ratios[0], stream)
    assert torch.equal(found, expected)


def test_a_users_model_trains_above_the_layer_and_pays_on_the_ledger(tmp_path):
    torch.manual_seed(0)
    model = Users(noise=ewft.release_once(4.0, 1e-5), output_dir=tmp_path / "run")
    assert list(model.state_dict()) == ["table.weight", "head.weight", "head.bias"]
    layer = model.noisy
    with pytest.raises(RuntimeError, match="no epoch has begun"):
        model(ids(), torch.arange(ROWS))
    first = None
    for epoch in (1, 2):
        layer.releases.set_epoch(epoch)
        output = model(ids(), torch.arange(ROWS))
        first = output if first is None else first
        assert torch.equal(output, first)  # each record is released once
    output.sum().backward()
    assert model.table.weight.grad is None
    assert model.head.weight.grad is not None
    layer.card().save(tmp_path / "card")
    layer.releases.ledger.close()
    assert verify(tmp_path / "card.json", ledger=tmp_path / "run" / "ledger.jsonl").holds
    assert 3.9 < layer.releases.epsilon() <= 4.0


def test_a_layer_without_its_noise_lets_nothing_pass():
    model = Users(noise=ewft.release_once(4.0, 1e-5)).eval()
    model.noisy.releases.remove()
    with torch.no_grad(), pytest.raises(RuntimeError, match="noise was removed"):
        model(ids())


def test_what_the_schedule_does_not_pay_for_is_refused():
    model = Users(noise=ewft.dp_forward(1, 4.0, 1e-5))
    model.noisy.releases.set_epoch(1)
    model(ids(), torch.arange(ROWS))
    with pytest.raises(RuntimeError, match="a second time in this epoch"):
        model(ids(), torch.arange(ROWS))
    with pytest.raises(ValueError, match="epochs 1 to 1"):
        model.noisy.releases.set_epoch(2)
    with pytest.raises(ValueError, match="sequence_length"):
        model(ids()[:, :2], torch.arange(ROWS))


def test_an_embedding_gives_the_rows_of_what_the_privatizer_draws():
    table = nn.Embedding(30, WIDTH)
    settings = {"eta": 3.0, "mechanism": "exponential", "special_ids": (0,)}
    layer = fastdp.nn.PrivateEmbedding(table, **settings, unsafe_seed=5)
    drawn = fastdp.TextPrivatizer(table.weight, **settings, unsafe_seed=5)(ids())
    assert torch.equal(layer(ids()), table(drawn))
    assert not torch.equal(drawn, ids())
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("told", [{"special_ids": (0,)}, {}])
def test_a_text_that_is_padded_otherwise_is_the_same_text(told):
    layer = fastdp.nn.PrivateEmbedding(nn.Embedding(30, WIDTH, padding_idx=0), eta=3.0, mechanism="exponential", **told)
    text = torch.tensor([[3, 1, 4]])
    for padding in range(4):
        layer(nn.functional.pad(text, (0, padding)))
    layer(nn.functional.pad(text, (2, 0)).int())
    assert layer.releases == 5
    layer(torch.zeros(9, 3, dtype=torch.int64))
    assert layer.releases == 5


def test_an_embedding_fits_into_a_stock_model_and_counts_each_text():
    model, inputs = build("bert"), batch("bert")
    inputs.pop("labels")
    keys = list(model.state_dict())
    layer = fastdp.nn.PrivateEmbedding(model.get_input_embeddings(), eta=1e6, mechanism="laplace", special_ids=(0,))
    plain = model.eval()(**inputs).logits
    model.set_input_embeddings(layer)
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(**inputs).logits, plain)
    assert layer.releases == 1
    inputs["input_ids"] = inputs["input_ids"][:1].clone()
    inputs = {name: value[:1] for name, value in inputs.items()}
    model(**inputs)
    card = layer.card()
    assert layer.releases == 2
    assert card["bound"].startswith("exp(2e+06 *")
    assert any("no text is released more than 2 times" in line for line in card["assumptions"])
    assert verify(card).holds
