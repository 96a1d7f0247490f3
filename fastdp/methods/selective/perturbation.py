"""`SelectivePerturbation`: private tokens of texts replaced once, at the source, with the budget of each text recorded."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastdp.files as files
from fastdp.accounting import Card, Claim
from fastdp.accounting.claim import read_claim
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.statements import PAPER_FLAWS
from fastdp.accounting.witness import count_release
from fastdp.locks import Lock
from fastdp.methods.encoding import ADDED, encode_private
from fastdp.methods.perturbation import Releases
from fastdp.methods.removed import replace_removed
from fastdp.methods.sap.vocabulary import table_of
from fastdp.methods.selective.card import PerturbedTexts
from fastdp.methods.selective.infill import infill
from fastdp.methods.selective.mechanism import FORMS, TokenMechanism, diameter_bound, public_radius
from fastdp.methods.selective.rules import RuleDetector
from fastdp.methods.selective.spans import PrivacyDetector, PrivacyPolicy, token_mask
from fastdp.methods.selective.typed import TypedCells
from fastdp.ops.stream import NoiseStream
from fastdp.validate import one_of, positive

MECHANISMS = (*FORMS, "typed")
BUDGETS = ("token", "text")
#: Seconds to wait for another process that draws for the same texts.
_LONGEST_WAIT = 600.0
SCOPES = ("private", "all")
REPLACEMENTS = ("model", "uniform")


@replace_removed
@dataclass(frozen=True)
class SelectivePerturbation:
    """Replace the private tokens of texts by draws from a public vocabulary, of the exponential mechanism or by type.

    After Pan and Wu (equations 1 to 5, algorithm 1). The guarantee covers the value of each token that the detector reports,
    and nothing else: see its card's list.

    Args:
        epsilon: budget of each private token, or of each text (``budget``); k private tokens compose to k epsilons. Draws are as
            strong as it allows on the public table (`TokenMechanism.strength`).
        mechanism: ``local`` (default) or ``paper``, see `fastdp.methods.selective.mechanism`; or ``typed``, see
            `fastdp.methods.selective.typed`. ``paper`` carries no guarantee, and its card says so.
        budget: ``token``, or ``text`` to share epsilon equally among a text's private tokens.
        radius: cap of distances (``local``) or the paper's d; None for the public table's median distance.
        alpha: the paper's factor.
        replacement: what ``typed`` draws from an answered type: ``uniform``, all of its tokens alike; or ``model``, what a
            public language model expects there, which must then be given as the table (`infill.infill`). Both cost nothing.
        scope: ``private`` tokens alone, or ``all`` (the baseline that perturbs every token).
        detector: finds private text; the rule detector by default.
        policy: which of it is private.

    Raises ValueError for settings out of range.
    """

    epsilon: float
    mechanism: str = "local"
    budget: str = "token"
    radius: float | None = None
    alpha: float = 1.0
    replacement: str = "uniform"
    scope: str = "private"
    detector: PrivacyDetector = field(default_factory=RuleDetector)
    policy: PrivacyPolicy = field(default_factory=PrivacyPolicy)

    def __post_init__(self) -> None:
        one_of(MECHANISMS, mechanism=self.mechanism)
        one_of(BUDGETS, budget=self.budget)
        one_of(SCOPES, scope=self.scope)
        one_of(REPLACEMENTS, replacement=self.replacement)
        if self.replacement == "model" and self.mechanism != "typed":
            raise ValueError("replacement 'model' draws from a type that was told: set mechanism='typed'")
        positive(epsilon=self.epsilon, alpha=self.alpha)
        if self.radius is not None:
            positive(radius=self.radius)

    def __call__(self, texts: Sequence[str], tokenizer: Any, table: Tensor | nn.Module, **where: Any) -> PerturbedTexts:
        """Perturb private ``texts`` once, by `open` with the arguments ``where``.

        Warns if no private token is found. Raises ValueError for a tokenizer or table that does not fit, spans outside their
        text, and a cache of something else. Texts that were drawn for another cache before are refused too, unless ``again`` is
        set (see `fastdp.accounting.witness`).
        """
        return self.open(table, tokenizer=tokenizer, **where)(texts)

    def open(
        self,
        table: Tensor | nn.Module,
        /,
        *,
        tokenizer: Any,
        max_length: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        stream: NoiseStream | None = None,
        again: bool = False,
    ) -> SelectiveReleases:
        """What perturbs texts by these settings on a public table.

        Args:
            table: [V, d] token embeddings of a public model, or the model itself; draws are made where they are.
            tokenizer: fast, with character offsets; public.
            max_length: tokens of a text that are kept; those cut off cost nothing.
            cache: file beside the private data. If it exists it is read back at no cost, and refused if it was made from
                other texts or with other settings: a second draw would be a second release.
            stream: source of the draws; a new one by default.
            again: draw anew for a cache what was drawn for another one before; the card says so.
        """
        return SelectiveReleases(self, table, tokenizer, max_length, cache, stream, again)

    def describe(self) -> dict[str, Any]:
        return {
            "name": "selective perturbation",
            "mechanism": self.mechanism,
            "epsilon": self.epsilon,
            "budget": self.budget,
            "radius": self.radius,
            "alpha": self.alpha if self.mechanism == "paper" else None,
            **({"replacement": self.replacement} if self.mechanism == "typed" else {}),
            "scope": self.scope,
            "detector": {"name": "every token"} if self.scope == "all" else self.detector.describe(),
            "policy": self.policy.describe(),
        }


class SelectiveReleases(Releases):
    """A `SelectivePerturbation` on a public table and tokenizer: called with texts, it perturbs them once."""

    def __init__(
        self,
        settings: SelectivePerturbation,
        table: Tensor | nn.Module,
        tokenizer: Any,
        max_length: int | None,
        cache: str | os.PathLike[str] | None,
        stream: NoiseStream | None,
        again: bool,
    ):
        self.settings, self.tokenizer, self.max_length, self.again = settings, tokenizer, max_length, again
        self.cache = None if cache is None else Path(cache)
        self.stream = NoiseStream() if stream is None else stream
        self._matrix = table_of(table).contiguous()
        if settings.replacement == "model" and not isinstance(table, nn.Module):
            raise ValueError("replacement 'model' reads the words around a place: give the public model, not its table")
        self._model = table if isinstance(table, nn.Module) else None
        self.radius = self._radius(self._matrix)
        #: What was perturbed last, or read back.
        self.released: PerturbedTexts | None = None

    def __call__(self, texts: Sequence[str]) -> PerturbedTexts:
        """Perturb texts, or read back what was drawn for them; see `SelectivePerturbation.__call__`."""
        encoded = _encode(self.tokenizer, texts, self.max_length)
        with contextlib.ExitStack() as stack:
            if self.cache is not None:
                # Another process that draws for the same texts is waited for, and what it drew is read back.
                path = self.cache.with_name(f".{self.cache.name}.lock")
                stack.enter_context(Lock(path, str(self.cache), seconds=_LONGEST_WAIT))
            if self.cache is not None and self.cache.exists():
                self.released = _read(self.cache, self._described(), self._private_settings(), encoded["input_ids"])
            else:
                self.released = self._drawn(texts, encoded)
        return self.released

    def examples(self, items: Sequence[Mapping[str, Any]], *, training: bool) -> list[dict[str, Any]]:
        """Training examples with their private tokens replaced, once, and read without being learned; queries as they are.

        Items come with ``special_tokens_mask``; the detector is asked about what their tokens spell.
        """
        plain = [{key: value for key, value in item.items() if key != ADDED} for item in items]
        if not training:
            return plain
        places = [[place for place, added in enumerate(item[ADDED]) if not added] for item in items]
        own = [[item["input_ids"][place] for place in kept] for item, kept in zip(items, places)]
        spelled = [spell_tokens(self.tokenizer, ids) for ids in own]
        encoded = {"input_ids": own, "offset_mapping": [offsets for _, offsets in spelled]}
        self.released = found = self._drawn([text for text, _ in spelled], encoded)
        learned = self.settings.scope == "all"
        for item, kept, ids, hidden in zip(plain, places, found.ids, found.private):
            full, read_only = list(item["input_ids"]), [False] * len(item["input_ids"])
            for place, token, replaced in zip(kept, ids, hidden):
                full[place], read_only[place] = token, replaced and not learned
            labels = labels_of(full, read_only)
            item["labels"] = [-100 if old == -100 else new for old, new in zip(item["labels"], labels)]
            item["input_ids"] = full
        return plain

    def in_words(self) -> str:
        card = self.card()
        if card["guarantee"] == "none":
            return f"none: {'; '.join(card['why_no_guarantee'])}"
        tokens, budget = card["tokens"], card["budget"]
        return (
            f"{card['bound']}, {card['unit']}, at most {budget['units']} of them a text; {tokens['private']} of "
            f"{tokens['all']} tokens were taken for private, and nothing is promised of the others"
        )

    def claim(self) -> Claim:
        """Of a private token, and of a text by the most that one of the texts holds."""
        return read_claim(self.card())

    def card(self) -> Card:
        """Of the texts that were perturbed last; its detector was not measured (see `PerturbedTexts.card`)."""
        if self.released is None:
            raise RuntimeError("nothing was perturbed yet: call this with texts first")
        return self.released.card()

    def flaws(self) -> list[str]:
        return list(PAPER_FLAWS) if self.settings.mechanism == "paper" else []

    def _described(self) -> dict[str, Any]:
        settings = self.settings.describe()
        return settings | {
            "radius": self.radius,
            "table": hashlib.sha256(self._matrix.cpu().numpy().tobytes()).hexdigest(),
            "max_length": self.max_length,
        }

    def _drawn(self, texts: Sequence[str], encoded: dict[str, Any]) -> PerturbedTexts:
        settings = self.settings
        private = self._private(texts, encoded)
        if not any(map(any, private)):
            warnings.warn("the detector found no private token: nothing is perturbed", stacklevel=4)
        ids, epsilons, strengths = self._draw(encoded["input_ids"], private, self._mechanism(), self.stream)
        made_with = self._described() | {"strengths": strengths}
        found = PerturbedTexts(ids, private, epsilons, made_with, self.stream.reproducible, self.stream.rounds)
        if self.cache is not None:
            how = f"selective perturbation ({settings.mechanism}, {settings.epsilon:g})"
            found = replace(found, earlier=tuple(count_release(texts, how, self.cache, self.again)))
            _write(self.cache, found, self._private_settings(), encoded["input_ids"])
        return found

    def _private_settings(self) -> Any:
        settings = None if self.settings.scope == "all" else getattr(self.settings.detector, "private_settings", None)
        return None if settings is None else settings()

    def _radius(self, matrix: Tensor) -> float | None:
        if self.settings.mechanism == "typed":
            return None
        given = self.settings.radius
        radius = public_radius(matrix) if given is None else given
        farthest = diameter_bound(matrix)
        if radius > farthest:
            raise ValueError(
                f"radius is {radius:g}, but no two rows of the table are farther apart than {farthest:g}: lower it"
            )
        return radius

    def _mechanism(self) -> TokenMechanism | TypedCells:
        # Rows beyond the tokenizer's own, of a table padded to a round size, stand for no token; special ones are never drawn.
        matrix = self._matrix[: len(self.tokenizer)]
        candidates = torch.ones(len(matrix), dtype=torch.bool)
        special = [token for token in self.tokenizer.all_special_ids if token < len(matrix)]
        candidates[special] = False
        if self.settings.mechanism == "typed":
            return TypedCells.of(self.tokenizer, candidates)
        assert self.radius is not None
        return TokenMechanism(self.settings.mechanism, matrix, self.radius, self.settings.alpha, candidates)

    def _private(self, texts: Sequence[str], encoded: dict[str, Any]) -> list[list[bool]]:
        if self.settings.scope == "all":
            return [[True] * len(ids) for ids in encoded["input_ids"]]
        found = self.settings.detector.detect(texts)
        if len(found) != len(texts):
            raise ValueError(f"the detector returned {len(found)} lists of spans for {len(texts)} texts")
        return [
            token_mask(offsets, self.settings.policy.private(text, spans))
            for text, spans, offsets in zip(texts, found, encoded["offset_mapping"])
        ]

    def _draw(
        self,
        ids: list[list[int]],
        private: list[list[bool]],
        mechanism: TokenMechanism | TypedCells,
        stream: NoiseStream,
    ) -> tuple[list[list[int]], list[float], dict[str, float]]:
        """Replaced ids, the budget of each text, and the strength that was drawn at for each budget of a token.

        Every private token of all texts is drawn in one call.
        """
        tokens = [token for own, mask in zip(ids, private) for token, hidden in zip(own, mask) if hidden]
        if tokens and max(tokens) >= len(mechanism):
            raise ValueError(
                f"the tokenizer's id {max(tokens)} has no row in the table of {len(mechanism)}: take the tokenizer "
                "and the table of one model"
            )
        counts = [sum(mask) for mask in private]
        shared = self.settings.budget == "text"
        budgets = [
            self.settings.epsilon / count if shared else self.settings.epsilon for count in counts for _ in range(count)
        ]
        strengths = {budget: mechanism.strength(budget) for budget in sorted(set(budgets))}
        at: float | Tensor = torch.tensor([strengths[budget] for budget in budgets], dtype=torch.float64)
        if len(strengths) == 1:
            at = next(iter(strengths.values()))
        epsilons = [self.settings.epsilon * (count > 0 if shared else count) for count in counts]
        owned = torch.tensor(tokens, dtype=torch.int64)
        if self.settings.replacement == "model" and isinstance(mechanism, TypedCells):
            assert self._model is not None
            told = iter(mechanism.answer(owned, at, stream).tolist())
            answers = [[next(told) if hidden else None for hidden in own] for own in private]
            # A private token stands nowhere from here on: its place is empty until it is drawn.
            kept = [[0 if hidden else token for token, hidden in zip(*pair)] for pair in zip(ids, private)]
            begin = self.tokenizer.bos_token_id
            replaced = infill(self._model, kept, answers, mechanism.allowed, stream, begin=begin)
        else:
            drawn = iter(mechanism.draw(owned, at, stream).tolist() if tokens else [])
            replaced = [
                [next(drawn) if hidden else token for token, hidden in zip(*pair)] for pair in zip(ids, private)
            ]
        return replaced, epsilons, {f"{budget:.6g}": strength for budget, strength in strengths.items()}


def labels_of(ids: Sequence[int], read_only: Sequence[bool]) -> list[int]:
    """What a language model learns of a text: its tokens, -100 for those that are only read; all of one that has no others."""
    labels = [-100 if hidden else token for token, hidden in zip(ids, read_only, strict=True)]
    # The first token is nobody's target.
    return labels if any(label != -100 for label in labels[1:]) else list(ids)


def spell_tokens(tokenizer: Any, ids: Sequence[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text that tokens spell, and of each token the characters that it takes part in."""
    text, offsets = "", []
    for end in range(1, len(ids) + 1):
        longer = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Of a letter of several tokens the first ones spell a mark that stands for no letter yet.
        start = len(text.rstrip("\ufffd"))
        offsets.append((start, max(len(longer), start)))
        text = longer
    return text, offsets


def _encode(tokenizer: Any, texts: Sequence[str], max_length: int | None) -> dict[str, Any]:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("the tokenizer gives no character offsets, so spans cannot be aligned: use a fast one")
    if not texts:
        return {"input_ids": [], "offset_mapping": []}
    encoded = encode_private(tokenizer, texts, return_offsets_mapping=True)
    return {key: [own[:max_length] for own in encoded[key]] for key in ("input_ids", "offset_mapping")}


def _keyed_digest(salt: str, value: Any) -> str:
    # With a salt of its own, so that the same text in two caches does not show.
    return hmac.new(bytes.fromhex(salt), canonical(value).encode(), hashlib.sha256).hexdigest()


def _write(path: Path, found: PerturbedTexts, private_settings: Any, original: list[list[int]]) -> None:
    """One file, written whole: a crash leaves no draw that a second one could be compared with."""
    salt = os.urandom(16).hex()
    tensors = {
        "ids": torch.tensor([token for own in found.ids for token in own], dtype=torch.int64),
        "private": torch.tensor([hidden for own in found.private for hidden in own], dtype=torch.bool),
        "lengths": torch.tensor([len(own) for own in found.ids], dtype=torch.int64),
        "epsilons": torch.tensor(found.epsilons, dtype=torch.float64),
    }
    metadata = {
        "settings": canonical(found.settings),
        "reproducible": json.dumps(found.reproducible),
        "rounds": json.dumps(found.rounds),
        "earlier": json.dumps(found.earlier),
        "salt": salt,
        "digest": _keyed_digest(salt, original),
        "private_settings": _keyed_digest(salt, private_settings),
    }
    files.save_tensors(path, tensors, metadata)


def _read(path: Path, settings: dict[str, Any], private_settings: Any, original: list[list[int]]) -> PerturbedTexts:
    with files.kept_tensors(path, "cache of perturbed texts") as (tensors, metadata):
        made_with = json.loads(metadata["settings"])
        salt = metadata["salt"]
        same_texts = hmac.compare_digest(metadata["digest"], _keyed_digest(salt, original))
        same_names = hmac.compare_digest(metadata["private_settings"], _keyed_digest(salt, private_settings))
    again = "perturbing anew would spend a second budget on what both share; name another file if you mean it"
    wanted = json.loads(canonical(settings))
    differing = next((key for key in wanted if made_with.get(key) != wanted[key]), None)
    if differing is not None:
        raise ValueError(f"{path} was made with another {differing}; {again}")
    if not same_names:
        raise ValueError(f"{path} was made with other private settings of the detector, such as its own names; {again}")
    if not same_texts:
        raise ValueError(f"{path} was made from other texts or another tokenizer; {again}")
    lengths = tensors["lengths"].tolist()
    ids = [part.tolist() for part in tensors["ids"].split(lengths)] if lengths else []
    private = [part.tolist() for part in tensors["private"].split(lengths)] if lengths else []
    drawn = json.loads(metadata["reproducible"]), json.loads(metadata.get("rounds", "20"))
    earlier = tuple(json.loads(metadata.get("earlier", "[]")))
    return PerturbedTexts(ids, private, tensors["epsilons"].tolist(), made_with, *drawn, earlier, from_cache=True)
