"""A model whose canaries have gradients of their own, and runs of it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp

#: Tokens that no other example holds, one a canary; then the tokens of the others; the last token is every label.
CANARIES, ORDINARY, WIDTH = 240, 8, 12
VOCABULARY = CANARIES + ORDINARY + 1
LABEL = VOCABULARY - 1


class Tied(nn.Module):
    """Reads one table twice, as an embedding and as the head (or, untied, two tables).

    The canaries' rows are nearly zero, so a canary's gradient lies almost wholly in the use as an embedding: its norm is
    far too small if that use is forgotten.
    """

    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            self.embedding.weight[:CANARIES] *= 1e-3
            self.head.weight.copy_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels):
        logits = self.head(self.embedding(ids).mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def canary(token):
    return {"ids": torch.tensor([token, token]), "labels": LABEL}


def ordinary():
    return [
        {"ids": torch.tensor([CANARIES + i, CANARIES + (i + 1) % ORDINARY]), "labels": LABEL} for i in range(ORDINARY)
    ]


def collate(items):
    return {"ids": torch.stack([i["ids"] for i in items]), "labels": torch.tensor([i["labels"] for i in items])}


def start(data, tied=True, lr=1e-3, **options):
    """A run that takes all of its data in every step, unless told otherwise: the clearest view of its noise."""
    model = Tied(tied)
    batch_size = options.pop("batch_size", len(data))
    loader = DataLoader(data, batch_size=batch_size, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    defaults = {"epochs": 4, "target_delta": 1e-8, "method": fastdp.DPSGD(max_grad_norm=0.1)}
    return fastdp.make_private(model, optimizer, loader, **{**defaults, **options})
