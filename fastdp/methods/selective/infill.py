"""Replacements that read like text: a public language model draws them, among the tokens of an answered type.

A private token's type goes by randomised response (`typed`). What is drawn after that depends on the answers, on other words,
on replacements drawn before, and on a public model. None of these tells more than the answers do, so epsilon stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastdp.calls.modes import in_mode
from fastdp.methods.response import uniform_fractions
from fastdp.ops.stream import NoiseStream

#: Texts that go through the model together.
_TEXTS = 64


def infill(
    model: nn.Module,
    texts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int | None]],
    allowed: Tensor,
    stream: NoiseStream,
    *,
    begin: int | None = None,
) -> list[list[int]]:
    """Texts whose answered places are drawn anew, from left to right, by what the model expects there of that type.

    Args:
        model: a public causal language model; an adapter on it is left out.
        texts: token ids. What stands at an answered place is not read.
        answers: the type that was answered at each place, or None where the token stays.
        allowed: bool [types, V], the tokens that may be drawn for an answer; at least one each.
        begin: the token that every text begins with in the model's eyes; without one a first place is drawn evenly.
    """
    found: list[list[int]] = [list(own) for own in texts]
    answered = [index for index, own in enumerate(answers) if any(type_ is not None for type_ in own)]
    answered.sort(key=lambda index: len(texts[index]))
    with torch.no_grad(), _as_published(model):
        for start in range(0, len(answered), _TEXTS):
            _fill(model, found, answers, answered[start : start + _TEXTS], allowed, stream, begin)
    return found


def choose(logits: Tensor, allowed: Tensor, fractions: Tensor) -> Tensor:
    """One token a row by softmax of logits [n, V] over the allowed ones, bool [n, V], and uniform fractions [n]: int64 [n]."""
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("the model that draws replacements has logits that are not finite: take another model")
    weights = logits.double().masked_fill(~allowed, -torch.inf).softmax(1)
    passed = weights.cumsum(1)
    chosen = torch.searchsorted(passed, (fractions * passed[:, -1])[:, None], right=True).flatten()
    # A fraction next to 1 may fall behind the last weight by a rounding.
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(1)
    return torch.minimum(chosen, last)


def _fill(
    model: nn.Module,
    found: list[list[int]],
    answers: Sequence[Sequence[int | None]],
    batch: Sequence[int],
    allowed: Tensor,
    stream: NoiseStream,
    begin: int | None,
) -> None:
    device = next(model.parameters()).device
    places = {place for index in batch for place, type_ in enumerate(answers[index]) if type_ is not None}
    past, logits, read = None, None, 0
    # Column 0 holds the token that begins a text; what a shorter text has behind its end is read by nobody.
    first = 0 if begin is None else 1
    for place in sorted(places):
        if place + first > read:
            columns = [([] if begin is None else [begin]) + found[index] for index in batch]
            new = [[own[at] if at < len(own) else 0 for at in range(read, place + first)] for own in columns]
            seen_so_far = torch.ones(len(batch), place + first, dtype=torch.int64, device=device)
            out: Any = model(
                input_ids=torch.tensor(new, device=device),
                attention_mask=seen_so_far,
                past_key_values=past,
                use_cache=True,
            )
            past, logits, read = out.past_key_values, out.logits[:, -1].float().cpu(), place + first
        rows = [
            row for row, index in enumerate(batch) if place < len(found[index]) and answers[index][place] is not None
        ]
        told = torch.tensor([answers[batch[row]][place] for row in rows])
        seen = torch.zeros(len(rows), allowed.shape[1]) if logits is None else logits[rows, : allowed.shape[1]]
        if seen.shape[1] < allowed.shape[1]:
            raise ValueError(
                f"the model has {seen.shape[1]} logits for {allowed.shape[1]} tokens: take the tokenizer's own"
            )
        for row, token in zip(rows, choose(seen, allowed[told], uniform_fractions(len(rows), stream)).tolist()):
            found[batch[row]][place] = token


@contextmanager
def _as_published(model: nn.Module) -> Iterator[None]:
    """The model in evaluation, without an adapter that it may have; what is trained of it stays what it was."""
    trained = [(p, p.requires_grad) for p in model.parameters()]
    with ExitStack() as stack:
        stack.callback(lambda: [p.requires_grad_(was) for p, was in trained])
        without_adapter: Any = getattr(model, "disable_adapter", None)
        if without_adapter is not None:
            # peft trains the whole adapter when it comes back, frozen parts of it too.
            stack.enter_context(without_adapter())
        stack.enter_context(in_mode(model, training=False))
        yield
