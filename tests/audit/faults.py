"""Runs at fault in ways that only many canaries show: noise at half its size, and a mask from private data.

Each trains a small model in full batches with canaries, and gives the lower bound on epsilon that they show.
"""

import torch
import torch.nn.functional as F
from fastdp.bench import workloads
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp import audit, ops
from fastdp.methods.rapft import PrivateSubset, PublicMap, RapFT
from fastdp.private.observer import Observer
from tests.loops import train
from tests.noise import noise_ops

CONFIDENCE = 0.95
DELTA = 1e-5


class Linear(nn.Module):
    """A classifier of 160,000 coordinates: room for as many canaries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(400, 400)

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.layer(x), labels)}


class Weaker(Observer):
    """Has the noise of a run made ``factor`` times what it should be, by a kernel at fault: a policy at fault is refused."""

    def __init__(self, factor):
        self.weaker = noise_ops(lambda total, std, add: add(total, std * factor))
        self.sound = {name: getattr(ops, name) for name in self.weaker}

    def before_release(self, accumulator):
        """Put the kernels at fault in the place of the sound ones."""
        vars(ops).update(self.weaker)

    def after_release(self, accumulator):
        """Put the sound kernels back."""
        vars(ops).update(self.sound)


def weaker_noise(canaries, factor, epsilon=2.0, steps=4):
    """DP-SGD whose noise is ``factor`` times what it claims, audited by gradient canaries."""
    rows = [{"x": torch.randn(400), "labels": torch.tensor(i)} for i in range(8)]
    model = Linear()
    private = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        DataLoader(rows, batch_size=len(rows)),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=steps,
    )
    private.observe(Weaker(factor))
    planted = audit.GradientCanaries(private, canaries)
    train(private)
    # One number of guesses, chosen beforehand: for a weak fault, the 2% of which the scores are surest.
    return planted.result(CONFIDENCE, shares=(0.02,))


def mask(canaries, private_mask, epsilon=2.0, steps=60):
    """Rap-FT, its mask from the private examples or from public ones, audited by examples with a token of their own.

    A token that no example holds has no relevance, so its row of the embedding is weak and gets the larger noise: the
    canary whose row is noised less was there.
    """
    ordinary = 8
    case = workloads.Case("bert", 1, 8, 8, heads=1, vocabulary=canaries + ordinary, tokens=4, dropout=0.0)
    model = workloads.build(case, torch.device("cpu"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("word_embeddings.weight"))
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight.normal_()
    rows = [{"input_ids": torch.full((2,), canaries + i), "labels": torch.tensor(i % 2)} for i in range(ordinary)]
    data, units = audit.with_canaries(
        rows, [{"input_ids": torch.full((2,), i), "labels": torch.tensor(i % 2)} for i in range(canaries)]
    )
    public = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    method = (
        RapFT(mode="paper", source=PrivateSubset(sample_rate=1.0))
        if private_mask
        else RapFT(source=PublicMap([public]))
    )
    private = fastdp.make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        DataLoader(data, batch_size=len(data)),
        method=method,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=steps,
    )
    planted = audit.ExampleCanaries(private, units, score="variance", refresh_every=steps)
    train(private)
    return audit.conclude(
        -planted.scores(),
        planted.included,
        # Of the event, as the paper accounts for it: the run itself states no epsilon where its mask is private.
        claimed=float(fastdp.accounting.epsilon(private.ledger.event(), DELTA)),
        delta=DELTA,
        confidence=CONFIDENCE,
        shares=(0.5,),
    )
