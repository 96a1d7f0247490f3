"""Losses of tokens that a model selects by the data's values: each token is its own row's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastdp.engine.errors import SelfCheckError
from tests.cases import cases
from tests.engine.nets import exact_batches
from tests.engine.reference import stepped

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def by_mask(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The token classifiers of earlier versions of transformers."""
    active = mask.view(-1) == 1
    return F.cross_entropy(logits.view(-1, 3)[active], labels.view(-1)[active])


def by_label(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return nn.CrossEntropyLoss()(logits[labels >= 0].float(), labels[labels >= 0])


def by_gather(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """DeBERTa's way, of tokens."""
    flat, logits = labels.view(-1), logits.view(-1, 3)
    index = (flat >= 0).nonzero()
    chosen = torch.gather(logits, 0, index.expand(index.size(0), logits.size(1)))
    return F.cross_entropy(chosen.view(-1, 3), torch.gather(flat, 0, index.view(-1)))


def by_where(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows, places = torch.where(labels >= 0)
    return F.cross_entropy(logits[rows, places], labels[rows, places])


def by_index_select(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    index = (labels.reshape(-1) >= 0).nonzero().squeeze(1)
    chosen = logits.reshape(-1, 3).index_select(0, index)
    return F.nll_loss(F.log_softmax(chosen, -1), labels.reshape(-1)[index])


def by_masked_select(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Numbers, not classes."""
    return F.mse_loss(logits[..., 0].masked_select(mask == 1), labels.masked_select(mask == 1).float())


class Tagger(nn.Module):
    """A class for each token."""

    def __init__(self, loss: Loss):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.loss = nn.Embedding(20, 6), nn.Linear(6, 3), loss

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = torch.tanh(self.table(ids)) * mask.unsqueeze(-1)
        return {"loss": self.loss(self.head(hidden), labels, mask)}


def tokens(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    generator, width = torch.Generator().manual_seed(seed), 6
    mask = torch.stack([(torch.arange(width) < n).long() for n in lengths])
    ids, labels = (torch.randint(0, n, mask.shape, generator=generator) for n in (20, 3))
    return {"ids": ids, "mask": mask, "labels": labels.masked_fill(mask == 0, -100)}


@cases("loss", [by_mask, by_label, by_gather, by_where, by_index_select, by_masked_select])
def test_tokens_that_the_data_select_count_for_their_own_rows(loss: Loss) -> None:
    # As many tokens as the rows divide, those of others, and all of them.
    lengths = [[2, 6, 3, 5], [1, 6, 1, 6], [4, 3, 6, 2], [6, 6, 6, 6], [1, 1, 1, 1]]
    exact_batches(lambda: Tagger(loss), [tokens(own, number) for number, own in enumerate(lengths)])


@cases("lengths", [[1, 0, 0, 0], [0, 0, 1], [2, 6, 3, 5]])
def test_one_selected_token_or_none_is_no_fault(lengths: list[int]) -> None:
    """squeeze() leaves one place without an axis."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        index = (labels.reshape(-1) >= 0).nonzero().squeeze()
        chosen, own = logits.reshape(-1, 3).index_select(0, index), labels.reshape(-1).index_select(0, index)
        return F.cross_entropy(chosen, own, reduction="sum") / len(labels)

    exact_batches(lambda: Tagger(loss), [tokens(lengths, 0), tokens([1, 6, 1, 6], 1)])


def test_selected_tokens_in_another_order_are_not_taken_for_their_rows() -> None:
    """A permutation behind the selection is followed to no row; each row runs alone."""

    def loss(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        chosen, own = logits[labels >= 0].flip(0), labels[labels >= 0].flip(0)
        return F.cross_entropy(chosen, own)

    exact_batches(lambda: Tagger(loss), [tokens([2, 6, 3, 5], 0)], route="one-example")


def by_slice(kinds: torch.Tensor, most: int) -> torch.Tensor:
    return kinds.nonzero().flatten()[:most]


def by_count(kinds: torch.Tensor, most: int) -> torch.Tensor:
    """Switch's rule, over all tokens of a batch."""
    return (kinds & (kinds.long().cumsum(0) <= most)).nonzero().flatten()


def by_rank(kinds: torch.Tensor, most: int) -> torch.Tensor:
    return kinds.float().topk(min(most, len(kinds)), dim=0).indices


@cases("keep", [by_slice, by_count, by_rank])
def test_places_that_other_rows_can_fill_run_row_by_row(keep: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    """An expert's capacity that the first batch does not reach: later rows could take each other's places."""

    class Capacity(Tagger):
        def __init__(self, loss: Loss):
            super().__init__(loss)
            self.expert = nn.Linear(6, 6)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(self.table(ids)).flatten(0, 1)
            kept = keep(ids.flatten() % 2 == 0, 24)
            mixed = torch.zeros_like(hidden).index_add(0, kept, self.expert(hidden[kept]))
            return {"loss": self.loss(self.head(mixed.view(*ids.shape, -1)), labels, mask)}

    exact_batches(lambda: Capacity(by_label), [tokens([2, 6, 3, 5], 0)], route="one-example")


def test_an_expert_that_a_later_batch_uses_twice() -> None:
    """Each row chooses two of the experts; only in the second batch is one of them somebody's first and another's second."""

    class Experts(Tagger):
        def __init__(self) -> None:
            super().__init__(by_label)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(self.table(ids)).flatten(0, 1)
            first = (ids.flatten() > 9).long()
            mixed = torch.zeros_like(hidden)
            for number, expert in enumerate(self.experts):
                for weight, chosen in ((0.7, first), (0.3, 1 - first)):
                    own = chosen == number
                    if own.any():
                        mixed[own] += weight * expert(hidden[own])
            return {"loss": self.loss(self.head(mixed.view(*ids.shape, -1)), labels, mask)}

    one, two = tokens([2, 6, 3, 5], 0), tokens([4, 3, 6, 2], 1)
    exact_batches(Experts, [{**one, "ids": one["ids"] % 10}, two])


def by_writing(order: torch.Tensor) -> torch.Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return back


class Sorted(Tagger):
    """Tokens go through frozen experts in the order of the experts, and back."""

    def __init__(self, back: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(by_label)
        self.back, self.experts = back, nn.Parameter(torch.randn(3, 6, 6), requires_grad=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.table(ids).flatten(0, 1)
        kinds, order = torch.sort(ids.flatten() % 3)
        parts = [hidden[order] @ self.experts[i] * (kinds == i).unsqueeze(1) for i in range(3)]
        found = torch.tanh(sum(parts))[self.back(order)].view(*ids.shape, -1)
        return {"loss": F.cross_entropy(self.head(found).flatten(0, 1), labels.flatten())}


@cases("back", [by_writing, torch.argsort])
def test_tokens_that_are_put_back_are_whose_they_were(back: Callable[[torch.Tensor], torch.Tensor]) -> None:
    exact_batches(lambda: Sorted(back), [tokens([6, 6, 6, 6], 0), tokens([2, 6, 3, 5], 1)])


@cases("back", [lambda order: torch.arange(len(order)), lambda order: by_writing(order.flip(0))])
def test_tokens_left_in_an_order_of_the_data_are_nobodys(back: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(SelfCheckError, match="couples rows|couple examples"):
        stepped(Sorted(back), tokens([6, 6, 6, 6], 0), 0.5)
