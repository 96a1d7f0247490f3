"""Typed cells: a private token's public type goes by randomised response, and of the token itself nothing is told.

Types are read off a public tokenizer: whether a token begins a word, and whether it is a number, a name, a capitalised or a
lower-case word, or a sign. The replacement is any token of the answered type, all equally likely. Tokens of one type have the
same law: between them epsilon is 0. Any other two differ by the odds of their types' answers, exp(epsilon) at most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastdp.methods.response import check_response, keep_probability, randomised_response, uniform_fractions
from fastdp.methods.selective.names import AMBIGUOUS, GIVEN_NAMES, SURNAMES
from fastdp.ops.stream import NoiseStream

#: Fewest tokens of a type of its own: types with fewer join the signs of their place in a word.
SMALLEST_TYPE = 16
#: How tokenizers mark a token that begins a word, and one that goes on with it.
_BEGINS, _GOES_ON = ("\u0120", "\u2581"), "##"
_NAMES = GIVEN_NAMES | SURNAMES
_MOST_DIGITS = 4
_LEFT = "other"


def token_types(tokenizer: Any, candidates: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """The type of every token of a public tokenizer: int64 [V], and the types' names.

    A token of no large type, as special ones may be, counts as of the largest. Only ``candidates``, bool [V], are ever drawn.
    """
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(candidates))))
    marked = {mark for mark in _BEGINS if any(t is not None and t.startswith(mark) for t in tokens)}
    cased = any(t is not None and t.lstrip("".join(_BEGINS))[:1].isupper() for t in tokens)
    found = [describe_token(t or "", marked, cased) for t in tokens]
    sizes = _sizes(found, candidates)
    for _ in range(2):  # What is left over joins its place in a word, and if that is not enough the rest.
        found = [name if sizes[name] >= SMALLEST_TYPE else f"{name.split(', ')[0]}, {_LEFT}" for name in found]
        sizes = _sizes(found, candidates)
    names = sorted(name for name in set(found) if sizes[name] >= SMALLEST_TYPE)
    if len(names) < 2:
        raise ValueError(
            f"this vocabulary has no two types of {SMALLEST_TYPE} tokens each: use another mechanism, such as local"
        )
    largest = max(names, key=sizes.__getitem__)
    types = torch.tensor([names.index(name if sizes[name] >= SMALLEST_TYPE else largest) for name in found])
    return types, tuple(names)


def _sizes(found: Sequence[str], candidates: Tensor) -> Counter[str]:
    """How many tokens that may be drawn are of each type."""
    return Counter(name for name, allowed in zip(found, candidates.tolist()) if allowed)


def describe_token(token: str, marked: set[str], cased: bool) -> str:
    if token.startswith(_GOES_ON) and len(token) > len(_GOES_ON):
        begins, word = False, token[len(_GOES_ON) :]
    elif token[:1] in marked:
        begins, word = True, token[1:]
    else:
        # With a mark of its own for beginnings, what has none goes on; with one for what goes on, it begins.
        begins, word = not marked, token
    return f"{'begins' if begins else 'goes on'}, {_kind(word, begins, cased)}"


def _kind(word: str, begins: bool, cased: bool) -> str:
    if word.isdecimal():
        return f"{min(len(word), _MOST_DIGITS)} digits"
    if not word.isalpha():
        return _LEFT
    named = word.casefold() in _NAMES and (word[0].isupper() or (not cased and word not in AMBIGUOUS))
    if begins and named:
        return "name"
    if len(word) > 1 and word.isupper():
        return "capitals"
    return "capitalised" if word[0].isupper() else "lower case"


@dataclass(frozen=True)
class TypedCells:
    """The law of a replacement by type; all of it public."""

    #: Of every token that a text may hold, int64 [V].
    types: Tensor
    #: Tokens that may be drawn, bool [V]; every type has one.
    candidates: Tensor

    def __post_init__(self) -> None:
        check_response(self._count, 1.0)
        if bool((self._sizes == 0).any()):
            raise ValueError(
                f"no token of type {int((self._sizes == 0).nonzero()[0])} may be drawn: join it with another"
            )

    @classmethod
    def of(cls, tokenizer: Any, candidates: Tensor) -> TypedCells:
        """By the types that the tokenizer's tokens show (`token_types`)."""
        return cls(token_types(tokenizer, candidates)[0], candidates)

    def __len__(self) -> int:
        return len(self.types)

    @cached_property
    def _count(self) -> int:
        return int(self.types.max()) + 1

    @cached_property
    def _sizes(self) -> Tensor:
        return torch.bincount(self.types[self.candidates], minlength=self._count)

    def strength(self, epsilon: float) -> float:
        """As much as it may cost: the bound is exact."""
        check_response(self._count, epsilon)
        return epsilon

    def log_probabilities(self, token: int, epsilon: float) -> Tensor:
        """Law of a token's replacement: log probabilities, float64 [V], -inf for what is never drawn."""
        kept = keep_probability(self._count, epsilon)
        answers = torch.full((self._count,), math.log((1 - kept) / (self._count - 1)), dtype=torch.float64)
        answers[self.types[token]] = math.log(kept)
        law = (answers - self._sizes.double().log())[self.types]
        return law.masked_fill(~self.candidates, -math.inf)

    def answer(self, ids: Tensor, epsilon: float | Tensor, stream: NoiseStream) -> Tensor:
        """The type that is told of each id, by randomised response at ``epsilon`` (a number, or float64 like ``ids``).

        int64 [n] to [n]; all that the tokens tell is in it.
        """
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.types):
            raise IndexError(f"an id lies outside the {len(self.types)} tokens that have a type")
        epsilons = torch.as_tensor(epsilon, dtype=torch.float64).expand(ids.shape)
        own, answers = self.types[ids.cpu()], torch.empty(ids.shape, dtype=torch.int64)
        for value in epsilons.unique().tolist():
            mine = epsilons == value
            answers[mine] = randomised_response(own[mine], self._count, value, stream)
        return answers

    def draw(self, ids: Tensor, epsilon: float | Tensor, stream: NoiseStream) -> Tensor:
        """One independent draw for each id, all tokens of the answered type alike: int64 [n] to [n]."""
        if not ids.numel():
            return ids.clone()
        answers = self.answer(ids, epsilon, stream)
        # That some of an answer's tokens are likelier by a rounding tells nothing of the token: only its type was answered.
        fractions = uniform_fractions(len(ids), stream)
        order = torch.argsort(self.types.masked_fill(~self.candidates, self._count), stable=True)
        starts = self._sizes.cumsum(0) - self._sizes
        return order[starts[answers] + (fractions * self._sizes[answers]).long()].to(ids.device)

    @cached_property
    def allowed(self) -> Tensor:
        """Which tokens may be drawn for which answer: bool [types, V]."""
        return (self.types == torch.arange(self._count)[:, None]) & self.candidates
