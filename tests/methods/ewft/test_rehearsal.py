"""Rehearsal: what learns, from what, and that nothing of it stays attached."""

import pytest
import torch

import fastdp
from fastdp.methods import ewft
from tests.engine.models import build

DELTA = 1e-5
ROWS, TOKENS = 16, 6


def batches(rows=ROWS):
    """Class 1 has the higher token ids."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 2, (rows,), generator=generator)
    ids = torch.randint(3, 20, (rows, TOKENS), generator=generator) + 20 * labels[:, None]
    made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return [{key: value[at : at + 4] for key, value in made.items()} for at in range(0, rows, 4)]


def perturbed_loss(model, noise):
    private = fastdp.EWFT(
        model, layer=1, noise=noise, sequence_length=TOKENS, dataset_size=ROWS, autoencoder=None, unsafe_seed=1
    )
    model.eval()
    with torch.no_grad():
        loss = sum(float(model(**batch).loss) for batch in batches() * 8)
    private.remove()
    return loss


def test_it_learns_below_and_above_the_noise_and_leaves_no_trace():
    torch.manual_seed(0)
    model, noise = build("bert"), ewft.release_once(100.0, DELTA)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    first = perturbed_loss(model, noise)
    model.requires_grad_(True)
    sequence = {"layer": 1, "noise": noise, "sequence_length": TOKENS}
    losses = ewft.rehearse(model, batches(), **sequence, passes=15, learning_rate=3e-3, unsafe_seed=0)
    assert len(losses) == 60
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("layer.0." in name for name in moved)
    assert any("classifier" in name for name in moved)
    assert perturbed_loss(model, noise) < 0.8 * first


def test_refusals():
    model = build("bert")
    sequence = {"layer": 1, "noise": ewft.release_once(8.0, DELTA), "sequence_length": TOKENS}
    with pytest.raises(ValueError, match="nothing to rehearse on"):
        ewft.rehearse(model, [], **sequence)
    with pytest.raises(ValueError, match="nothing to rehearse on"):
        ewft.rehearse(model, batches(), **sequence, passes=0)
    with pytest.raises(ValueError, match="has no labels"):
        ewft.rehearse(model, [{"input_ids": torch.ones(2, TOKENS, dtype=torch.int64)}], **sequence)
    with pytest.raises(ValueError, match="layer is 9"):
        ewft.rehearse(model, batches(), **{**sequence, "layer": 9})
    # A failure leaves nothing attached.
    with pytest.raises(ValueError, match="pad"):
        ewft.rehearse(model, batches(), **{**sequence, "sequence_length": TOKENS + 1})
    ewft.rehearse(model, batches(), **sequence, passes=1)
