"""Tensors that look like constants along the vocabulary and are none: the logits they meet are computed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fastdp.engine.uses.logits import Heads
from tests.cases import cases
from tests.engine.test_head import VOCABULARY, Speaker, data, exact, small_tiles  # noqa: F401

ALONG = torch.linspace(0.5, 1.5, VOCABULARY)
BETWEEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "[V, 1]": (lambda z: z * ALONG.to(z.dtype).view(-1, 1), False),
    "[1, V, 1]": (lambda z: z + ALONG.to(z.dtype).view(1, -1, 1), False),
    "[V]": (lambda z: z * ALONG.to(z.dtype), True),
    "[1, V]": (lambda z: z + ALONG.to(z.dtype).view(1, -1), True),
    "[1, 1]": (lambda z: z * torch.full((1, 1), 0.7, dtype=z.dtype), True),
}


@cases("shape", BETWEEN)
def test_as_many_tokens_as_words(shape: str) -> None:
    """A scale of each token is as long as one of each word: its shape says which it is."""
    between, left_out = BETWEEN[shape]
    exact(Speaker(between=between), data(tokens=VOCABULARY), left_out=left_out)


@cases("reduction", ["mean", "sum", "none"])
def test_a_loss_of_the_plain_model_counts_the_labels_that_are_there(reduction: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 5), torch.randn(VOCABULARY, 5)
    target = torch.tensor([1, -100, 3, -100, 0, 7])
    own = Heads(always=True).leave_out(hidden, weight, None, lambda: F.linear(hidden, weight))
    assert type(own).__name__ == "Logits"
    found = F.cross_entropy(own, target, reduction=reduction)
    torch.testing.assert_close(found, F.cross_entropy(F.linear(hidden, weight), target, reduction=reduction))
    assert own.source.logits is None, "the logits were not computed"
