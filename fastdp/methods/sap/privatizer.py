"""Text privatization before text leaves: each token is replaced by a random one near it (section 4.3)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

import fastdp.ops as ops
from fastdp.accounting import Card, Metric, Pure, noise_source
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.statements import ONE_TOKEN, PUBLIC_TABLE, REPLACED_TOKENS
from fastdp.accounting.weights import value_bytes
from fastdp.methods.encoding import ADDED, encode_private
from fastdp.methods.exact import lipschitz, log_normalisers
from fastdp.methods.perturbation import Releases
from fastdp.methods.response import check_response
from fastdp.methods.sap.cti import CTI
from fastdp.methods.sap.importance import check_eta
from fastdp.methods.sap.quotient import Quotient, representatives
from fastdp.methods.sap.vocabulary import check_rows, decodable_ids, kept_tokens, table_of, unknown_id_of
from fastdp.ops.stream import NoiseStream
from fastdp.validate import one_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Output = Literal["text", "ids"]


@dataclass(frozen=True)
class Displacement:
    """What a privatizer does to some tokens, spread evenly over the public vocabulary."""

    eta: float | None
    #: Share of tokens that stay what they were; they leave in the clear.
    unchanged: float
    #: Mean distance between the row of a token and that of its replacement.
    mean_displacement: float
    tokens: int


#: The class of a token whose text has none.
_NO_LABEL = -1
#: What draws by each form of CTI; the first unless another is asked for.
_DRAWN_BY = {
    None: ("laplace", "exponential"),
    "paper": ("laplace",),
    "prior": ("exponential",),
    "quotient": ("quotient",),
}


@dataclass(frozen=True, kw_only=True)
class SAPPerturbation:
    """Settings of a `TextPrivatizer`, which see; `open` makes one of a public table."""

    eta: float | None = None
    epsilon: float | None = None
    mechanism: str | None = None
    cti: CTI | None = None
    unknown: str = "perturb"
    duplicates: str = "refuse"

    def __post_init__(self) -> None:
        cti = self.cti
        if cti is not None and cti.cells is not None:
            if self.eta is not None or self.epsilon is None:
                raise ValueError(
                    "CTI in the 'quotient' form guarantees an epsilon at any distance: give epsilon, not eta"
                )
            check_response(int(cti.cells.max()) + 1, self.epsilon)
        elif self.epsilon is not None:
            raise ValueError(
                "epsilon of a token belongs to CTI in the 'quotient' form: give eta, in units of 1 / distance"
            )
        elif self.eta is None:
            raise ValueError("eta is missing: give one above 0, in units of 1 / distance")
        else:
            object.__setattr__(self, "eta", check_eta(self.eta))
        drawn_by = _DRAWN_BY[None if cti is None else cti.form]
        object.__setattr__(self, "mechanism", self.mechanism or drawn_by[0])
        one_of(drawn_by, mechanism=self.mechanism)
        one_of(("perturb", "refuse"), unknown=self.unknown)
        one_of(("refuse", "merge"), duplicates=self.duplicates)

    def open(self, table_or_model: Tensor | nn.Module, /, **where: Any) -> TextPrivatizer:
        """The privatizer of a public table; ``where`` holds its ``tokenizer``, or ``special_ids``."""
        return TextPrivatizer(table_or_model, **vars(self), **where)


class TextPrivatizer(Releases):
    """Replaces tokens at random, so that near tokens are hard to tell apart: eta * distance metric privacy a token.

    With CTI in the ``quotient`` form it is epsilon for any two tokens, however far apart, and 0 for those of one cell.
    Every call is a release of its own: the same text sent E times costs E times as much.

    Args:
        table_or_model: the embedding table [V, d], public, or a model with input embeddings; draws are made where it is.
        eta: privacy parameter, in units of 1 / distance. Small is private; look at `displacement` before choosing.
        epsilon: of one token, in place of eta; the ``quotient`` form alone.
        tokenizer: needed for text; it also tells which tokens have a role (`fastdp.methods.encoding.ROLES`) and stay where an
            encoder put them. Other tokens that it calls special are never drawn; in a text they are text.
        mechanism: ``laplace`` (multivariate Laplace noise and the nearest row) or ``exponential``.
        cti: favour tokens that contribute to the task; its sound forms are draws of the exponential mechanism.
        unknown: ``perturb`` replaces the unknown token as any other, ``refuse`` raises ValueError where it occurs.
        duplicates: ``refuse`` a table with equal rows, or ``merge`` them: such tokens answer for one another.
        special_ids: tokens that stay, where no tokenizer tells them.
        unsafe_seed: randomness that whoever knows the seed can repeat: for tests.

    Attributes:
        kept: which ids stay wherever they stand, bool [V].
        tokens_released, tokens_kept: how many tokens of texts were replaced, and how many stayed.

    Raises ValueError for eta not above 0, a table with a NaN or an infinity or with equal rows, settings that do not fit.
    """

    card_name = "statement"

    def __init__(
        self,
        table_or_model: Tensor | nn.Module,
        *,
        eta: float | None = None,
        epsilon: float | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        mechanism: str | None = None,
        cti: CTI | None = None,
        unknown: str = "perturb",
        duplicates: str = "refuse",
        special_ids: Sequence[int] = (),
        unsafe_seed: int | None = None,
    ):
        own = SAPPerturbation(
            eta=eta, epsilon=epsilon, mechanism=mechanism, cti=cti, unknown=unknown, duplicates=duplicates
        )
        self.eta, self.epsilon_of_a_token, self.mechanism = own.eta, own.epsilon, str(own.mechanism)
        # Only the quotient has no eta, and it knows no distance.
        self._eta = math.nan if own.eta is None else own.eta
        if isinstance(tokenizer, str):
            raise TypeError(f"tokenizer is the text {tokenizer!r}: give the tokenizer that AutoTokenizer loads from it")
        self.tokenizer, self.cti, self.unknown = tokenizer, cti, unknown
        table = table_of(table_or_model)
        self._unknown_id = unknown_id_of(tokenizer)
        self.kept = kept_tokens(table.shape[0], tokenizer, special_ids, self._unknown_id).to(table.device)
        self._decodable = decodable_ids(table.shape[0], tokenizer).to(table.device)
        drawn = ~self.kept & self._decodable
        if tokenizer is not None:
            drawn[[token for token in tokenizer.all_special_ids if token != self._unknown_id]] = False
        self._ids = drawn.nonzero().flatten()
        self._row_of = torch.full((table.shape[0],), -1, dtype=torch.int64, device=table.device)
        self._row_of[self._ids] = torch.arange(len(self._ids), device=table.device)
        self._rows = table[self._ids].contiguous()
        # What maps tokens is where the table is, so that ids which are there too never leave that device.
        self._table = table
        if len(self._rows) < 2:
            raise ValueError("fewer than two tokens are left to draw from: nothing would be hidden")
        check_rows(self._rows, self._ids, "merge" if self.mechanism == "quotient" else own.duplicates)
        if cti is not None and cti.importance.shape[1] != table.shape[0]:
            raise ValueError(f"cti tells of {cti.importance.shape[1]} tokens, the table has {table.shape[0]}")
        self._quotient = _quotient(cti, drawn.cpu(), own.epsilon)
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        self.tokens_released, self.tokens_kept = 0, 0
        self._nats: float | None = None

    def __call__(
        self,
        inputs: Any,
        *,
        labels: Any = None,
        attention_mask: Tensor | None = None,
        special_tokens_mask: Any = None,
        output: Output | None = None,
    ) -> Any:
        """Privatize text or ids; text gives text, ids give ids.

        Of ids, tokens of a kept role stay wherever they stand, unless ``special_tokens_mask`` says which ones the encoder put
        there (`fastdp.methods.encoding.encode_private`). Give it if the tokenizer is not your own: its maker may have given
        any word such a role. Of text nothing stays.

        Args:
            inputs: a text or a list of texts; or ids: an int64 tensor of any shape, a list, or a list of lists.
            labels: with CTI, the class of each text (or row of ids); None uses the largest importance over classes.
            attention_mask: of the shape of a tensor of ids; positions at 0 are padding and stay.
            special_tokens_mask: of the form of the ids; 1 where the encoder added a token, which may stay.
            output: ``ids`` returns lists of ids for texts.
        """
        if isinstance(inputs, str):
            return self._texts([inputs], None if labels is None else [labels], output)[0]
        if isinstance(inputs, Tensor):
            return self._tensor(inputs, labels, attention_mask, special_tokens_mask)
        items = list(inputs)
        if items and isinstance(items[0], str):
            return self._texts(items, labels, output)
        if items and isinstance(items[0], (list, tuple)):
            return self._lists(items, labels, special_tokens_mask)
        added = None if special_tokens_mask is None else [special_tokens_mask]
        return self._lists([items], None if labels is None else [labels], added)[0]

    def stream_texts(
        self,
        texts: Iterable[str],
        labels: Iterable[int | None] | None = None,
        *,
        output: Output = "text",
        batch_tokens: int = 8192,
    ) -> Iterator[Any]:
        """Privatize any number of texts, in order, holding about ``batch_tokens`` of them at a time."""
        held: list[str] = []
        classes: list[int | None] = []
        size = 0
        for text, label in zip(texts, repeat(None) if labels is None else labels):
            held.append(text)
            classes.append(label)
            # Four characters a token is near enough to bound memory.
            size += 1 + len(text) // 4
            if size >= batch_tokens:
                yield from self._texts(held, classes, output)
                held, classes, size = [], [], 0
        if held:
            yield from self._texts(held, classes, output)

    def _texts(self, texts: Sequence[str], labels: Sequence[int | None] | None, output: Output | None) -> list[Any]:
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: give TextPrivatizer one, or give ids")
        encoded = encode_private(self.tokenizer, texts)
        private = self._lists(encoded["input_ids"], labels, encoded[ADDED])
        if output == "ids":
            return private
        return self.tokenizer.batch_decode(private, clean_up_tokenization_spaces=False)

    def _lists(
        self, rows: Sequence[Sequence[int]], labels: Sequence[int | None] | None, added: Sequence[Sequence[int]] | None
    ) -> list[list[int]]:
        lengths = [len(row) for row in rows]
        if added is not None and [len(row) for row in added] != lengths:
            raise ValueError("special_tokens_mask has another form than the ids: give one entry for each id")
        if labels is not None and len(labels) != len(rows):
            raise ValueError(f"{len(labels)} labels for {len(rows)} texts: give one for each")
        tokens = [token for row in rows for token in row]
        flat = torch.tensor(tokens) if tokens else torch.empty(0, dtype=torch.int64)
        spread = None
        if labels is not None:
            known = torch.tensor([_NO_LABEL if label is None else int(label) for label in labels], dtype=torch.int64)
            spread = known.repeat_interleave(torch.tensor(lengths))
        marks = None if added is None else torch.tensor([bool(mark) for row in added for mark in row], dtype=torch.bool)
        private = self._privatize(flat, spread, marks).split(lengths) if rows else ()
        return [own.tolist() for own in private]

    def _tensor(self, ids: Tensor, labels: Any, mask: Tensor | None, added: Any) -> Tensor:
        spread = None
        if labels is not None:
            given = torch.as_tensor(labels).reshape(-1)
            if given.numel() not in (1, ids.shape[0] if ids.dim() else 1):
                raise ValueError(f"{given.numel()} labels for {ids.shape[0]} rows of ids: give one for each")
            spread = given.reshape((-1,) + (1,) * (ids.dim() - 1)).expand(ids.shape)
        named = {"special_tokens_mask": added, "attention_mask": mask}
        marks, real = (_mask_of(name, given, ids) for name, given in named.items())
        # Padding stays, whatever its ids.
        text: Any = ... if real is None else real
        drawn = self._privatize(
            ids[text], None if spread is None else spread.to(ids.device)[text], None if marks is None else marks[text]
        )
        result = ids.to(torch.int64, copy=True)
        result[text] = drawn
        return result

    def _privatize(self, given: Tensor, labels: Tensor | None, added: Tensor | None) -> Tensor:
        """Ids of any shape, to the same on their device; ``labels`` is the class of each, ``added`` which ones may stay."""
        size, device = len(self._row_of), self._table.device
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise ValueError(f"the ids are {given.dtype}: give whole numbers, as a tokenizer does")
        ids = given.to(device, torch.int64)
        outside = ids[(ids < 0) | (ids >= size)]
        if len(outside):
            raise ValueError(
                f"token id {int(outside[0])} is outside the vocabulary of {size}: give the ids of this table's tokenizer"
            )
        if self.unknown == "refuse" and self._unknown_id is not None and bool((ids == self._unknown_id).any()):
            raise ValueError("a text holds an unknown token: pass unknown='perturb' to replace it like any other")
        moved = ~self.kept[ids] if added is None else ~(self.kept[ids] & added.to(device))
        result = ids.clone()
        # The quotient's law is the same for every class.
        of_class: dict[int | None, Tensor] = {None: moved}
        if labels is not None and self.cti is not None and self._quotient is None:
            labels = labels.to(device)
            classes = labels[moved].unique().tolist()
            of_class = {None if label == _NO_LABEL else label: moved & (labels == label) for label in classes}
        for label, mine in of_class.items():
            result[mine] = self._replaced(ids[mine], label)
        self.tokens_released += int(moved.sum())
        self.tokens_kept += int((~moved).sum())
        return result.to(given.device)

    def _replaced(self, ids: Tensor, label: int | None) -> Tensor:
        """A draw for each id."""
        if self._quotient is not None:
            # Its answers are drawn by the processor: a few numbers from a table of its own.
            return self._quotient.draw(ids.cpu(), self.stream).to(ids.device)
        return self._ids[self._draw(self._rows_for(ids), label)]

    def _rows_for(self, ids: Tensor) -> Tensor:
        """Rows of tokens in a text. One that is never drawn stands for the nearest that is: a public map, before any draw."""
        missing = ids[self._row_of[ids] < 0].unique()
        if bool((~self._decodable[missing]).any()):
            raise ValueError(
                "a token id has a row in the table but is not in the tokenizer's vocabulary: encode with this tokenizer"
            )
        if len(missing):
            self._row_of[missing] = ops.snap(self._table[missing].nan_to_num(), self._rows)
        return self._row_of[ids]

    def _draw(self, rows: Tensor, label: int | None) -> Tensor:
        if self.mechanism == "laplace":
            eta = self._eta if self.cti is None else self._per_row(self.cti.eta_of(label, self._eta))[rows]
            return ops.private_snap(rows, self._rows, eta, self.stream)
        prior = self._log_prior(label)
        return ops.exponential_choice(rows, self._rows, self._eta / 2, self.stream, log_prior=prior)

    def _log_prior(self, label: int | None) -> Tensor | None:
        """What favours the tokens of a class."""
        return None if self.cti is None else self.cti.tilt * self._per_row(self.cti.importance_of(label))

    def _per_row(self, value: Tensor) -> Tensor:
        return value.to(self._ids.device)[self._ids]

    def displacement(self, tokens: int = 2000) -> Displacement:
        """Share left unchanged, kept tokens included, and mean displacement, tried on tokens spread over the vocabulary."""
        known = self._decodable.nonzero().flatten()
        tried = known[:: max(1, len(known) // max(1, tokens))]
        kept = self.kept[tried]
        drawn = tried.clone()
        drawn[~kept] = self._replaced(tried[~kept], None)
        moved = torch.zeros(len(tried), dtype=torch.float64, device=tried.device)
        moved[~kept] = (self._table[drawn[~kept]].double() - self._table[tried[~kept]].double()).norm(dim=1)
        return Displacement(self.eta, float((drawn == tried).double().mean()), float(moved.mean()), len(tried))

    def log_probabilities(self, token: int, label: int | None = None) -> Tensor:
        """Log probability of each id as the replacement of a token, float64 [V]; -inf for ids that are never drawn."""
        if self._quotient is not None:
            return self._quotient.log_probabilities(token)
        if self.mechanism == "laplace":
            raise ValueError("the Laplace mechanism's probabilities have no closed form: use mechanism='exponential'")
        row, prior = int(self._row_of[token]), self._log_prior(label)
        law = ops.choice_log_probabilities(row, self._rows, self._eta / 2, log_prior=prior)
        result = torch.full((len(self._row_of),), -torch.inf, dtype=torch.float64)
        result[self._ids.cpu()] = law.cpu()
        return result

    def digest(self) -> str:
        """SHA-256, in hex, of all that its draws follow but the noise: settings, rows and the importance of tokens."""
        cti = self.cti
        # In the form of earlier releases, whose digests folders hold.
        strength = self.eta if self._quotient is None else ["epsilon", self.epsilon_of_a_token]
        settings = [strength, self.mechanism, "keep", self.unknown, self.kept.nonzero().flatten().tolist()]
        found = hashlib.sha256(canonical([*settings, None if cti is None else cti.describe()]).encode())
        parts = [self._ids, self._rows, *(() if cti is None else (cti.importance, cti.supported))]
        if self._quotient is not None:
            parts += [self._quotient.cell_of, self._quotient.representatives]
        for tensor in parts:
            found.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
            found.update(value_bytes(tensor))
        return found.hexdigest()

    def bound(self, token: int, other: int, label: int | None = None) -> float:
        """How far, in nats, the laws of two tokens' replacements may differ; inf where no bound holds.

        For texts of one length the bounds of their positions add up.
        """
        if self._quotient is not None:
            return self._quotient.bound(token, other)
        a, b = int(self._row_of[token]), int(self._row_of[other])
        if a == b:
            return 0.0
        if min(a, b) < 0:
            return float("inf")
        distance = float((self._rows[a].double() - self._rows[b].double()).norm())
        if self.cti is None or self.cti.form == "prior":
            return self._eta * distance
        eta = self._per_row(self.cti.eta_of(label, self._eta))
        return float(eta[a]) * distance if eta[a] == eta[b] else float("inf")

    def nats_per_distance(self) -> float:
        """What a replacement really costs for each unit of distance on this table: an upper bound, at most eta.

        For the exponential mechanism it is half of eta and the Lipschitz constant of log Z, the largest over classes
        (`fastdp.methods.exact`). Two passes over the distances of the vocabulary, once; later statements hold it. The Laplace
        mechanism costs eta, the paper's CTI inf. Raises ValueError for the quotient, whose bound has no distance.
        """
        if self._quotient is not None:
            raise ValueError(
                "the quotient costs the same at any distance, its epsilon: there is no cost for a unit of distance"
            )
        if self._nats is None:
            labels = [None] if self.cti is None else [None, *range(self.cti.classes)]
            self._nats = max(self._nats_of(label) for label in labels)
        return self._nats

    def _nats_of(self, label: int | None) -> float:
        if self.mechanism == "laplace":
            return self._eta if self.cti is None else math.inf
        scale = self._eta / 2
        (logs,), error = log_normalisers(self._rows, [scale], None, self._log_prior(label))
        return scale + lipschitz(self._rows, logs, error, scale)

    def examples(self, items: Sequence[Mapping[str, Any]], *, training: bool) -> list[dict[str, Any]]:
        """Examples with their tokens replaced, once, and their labels too where these are tokens.

        Labels of training examples choose among the importances of CTI; those of queries are not known.
        """
        known = [item["labels"] for item in items] if training and self.cti is not None else None
        rows = self._lists([item["input_ids"] for item in items], known, [item[ADDED] for item in items])
        found = []
        for item, row in zip(items, rows):
            labels = item["labels"]
            if isinstance(labels, list):
                labels = [label if label < 0 else token for label, token in zip(labels, row)]
            kept = {key: value for key, value in item.items() if key != ADDED}
            found.append({**kept, "input_ids": row, "labels": labels})
        return found

    def flaws(self) -> list[str]:
        return [] if self.cti is None else self.cti.flaws()

    def in_words(self) -> str:
        card = self.statement()
        if card["guarantee"] == "none":
            return f"none: {'; '.join(card['why_no_guarantee'])}"
        words = f"{card['bound']}, a token; {card['displacement']['unchanged']:.1%} of the vocabulary's tokens stay what they are"
        for counts in card["also"]:
            stated = counts["epsilon"]
            words += (
                f"; epsilon {stated['upper_bound']:.3f} at delta {stated['delta']:g} for the counts, {counts['unit']}"
            )
        return words

    def card(self) -> Card:
        return self.statement()

    def statement(self, releases: int = 1) -> Card:
        """The card of a text that was privatized ``releases`` times. Raises ValueError for less than 1."""
        cti = self.cti
        counts = None if cti is None else cti.claim()
        kept: list[Any] = self.kept.nonzero().flatten().tolist()
        if self.tokenizer is not None:
            kept = list(map(str, self.tokenizer.convert_ids_to_tokens(kept)))
        return Card.of(
            replace(self.claim(), releases=releases),
            mechanism={"name": self.mechanism, "cti": None if cti is None else cti.describe()},
            noise_source=noise_source(self.stream.reproducible, rounds=self.stream.rounds),
            also=() if counts is None else (counts,),
            flaws=self.flaws(),
            assumptions=(
                PUBLIC_TABLE,
                "each text is released once: E releases of a text cost E times the bound"
                if releases == 1
                else f"no text is released more than {releases} times, for which the bound stands",
            ),
            unprotected=REPLACED_TOKENS,
            facts={
                **({"eta": self.eta} if self._quotient is None else {"epsilon_of_a_token": self.epsilon_of_a_token}),
                "nats_per_distance": self._nats if self._nats is not None and math.isfinite(self._nats) else None,
                "displacement": asdict(self.displacement()),
                "policy": {"unknown": self.unknown, "kept": kept},
                "vocabulary": len(self._rows),
                "tokens_released": self.tokens_released,
                "tokens_kept": self.tokens_kept,
            },
        )

    def claim(self) -> Pure:
        """Of one token: the quotient's epsilon; otherwise, for each unit of distance, eta or what it was found to cost."""
        if self.epsilon_of_a_token is not None:
            return Pure(ONE_TOKEN, self.epsilon_of_a_token)
        distance = "distance of the tokens' rows"
        if self.cti is not None and self.cti.form == "paper":
            distance += " of equal eta, and nothing between others"
        found = self._nats is not None and math.isfinite(self._nats)
        return Metric(ONE_TOKEN, float(self._nats or 0.0) if found else self._eta, distance=distance)

    @property
    def in_short(self) -> str:
        if self._quotient is not None:
            return f"quotient of {len(self._quotient.representatives)} cells, epsilon {self.epsilon_of_a_token:g}"
        return f"{self.mechanism}, eta {self.eta:g}"


def _mask_of(name: str, given: Any, ids: Tensor) -> Tensor | None:
    """A mask of the shape of the ids, as truth values where they are. Raises ValueError for another shape."""
    if given is None:
        return None
    mask = torch.as_tensor(given)
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}, the ids {list(ids.shape)}")
    return mask.to(ids.device) != 0


def _quotient(cti: CTI | None, drawn: Tensor, epsilon: float | None) -> Quotient | None:
    if cti is None or cti.cells is None or cti.mass is None:
        return None
    assert epsilon is not None
    return Quotient(cti.cells, representatives(cti.cells, cti.importance, cti.mass, drawn), epsilon)
