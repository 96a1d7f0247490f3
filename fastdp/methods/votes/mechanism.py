"""The release: each record gives one vote to its nearest candidate, and counts leave with Gaussian noise.

Source: private evolution, algorithm 1 of arXiv 2305.15560, and of arXiv 2403.01749 for texts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import fastdp.accounting as accounting
from fastdp.accounting.ledger import STEP
from fastdp.accounting.statements import EVERY_ROUND, PUBLIC_CANDIDATES
from fastdp.ops import NoiseStream, add_noise_, snap
from fastdp.ops.grid import DISTANCE
from fastdp.validate import instance, integer, number

Embed = Callable[[list[str]], Tensor]
#: From here on float32 skips whole numbers, and one vote might move a count by 2.
_MOST_TEXTS = 1 << 24


def vote_counts(records: Tensor, record_labels: Tensor, candidates: Tensor, candidate_labels: Tensor) -> Tensor:
    """How many records have each candidate as the nearest of their label.

    Of records [N, d] and candidates [V, d], with labels int64 [N] and [V], to int64 [V]. A record that is not finite, or whose
    label has no candidate, does not vote. One record more or less changes one count by 1, so the L2 sensitivity is 1.
    """
    counts = torch.zeros(len(candidates), dtype=torch.int64)
    votes = torch.isfinite(records).all(1)
    for label in candidate_labels.unique():
        chosen, places = records[votes & (record_labels == label)], (candidate_labels == label).nonzero()[:, 0]
        counts[places] = torch.bincount(snap(chosen, candidates[places]), minlength=len(places))
    return counts


class PrivateVotes:
    """Private texts that vote, round after round, for the candidates nearest to them.

    Every record votes once a round for one candidate of its own label. A round releases all counts together, each with
    Gaussian noise. Rounds compose; no subsampling is claimed.

    Args:
        texts: the private records.
        embed: a list of k texts -> float [k, d]. A private text is embedded alone, so that no other can move its vote.
        rounds: how many rounds are paid for.
        target_epsilon, target_delta: budget of all rounds together.
        labels: public label of each record, as in what a class is called; None puts all under one, "".
        output_dir: where the ledger is kept; None keeps it in memory.
        resume: go on with the ledger there.
        unsafe_seed: reproducible noise, which voids the guarantee.

    Raises ValueError for no text or 2^24 of them, labels of another number, a budget that cannot be met, or a folder in use.
    """

    def __init__(
        self,
        texts: Sequence[str],
        embed: Embed,
        *,
        rounds: int,
        target_epsilon: float,
        target_delta: float,
        labels: Sequence[str] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        unsafe_seed: int | None = None,
    ) -> None:
        if isinstance(texts, str):
            raise ValueError("texts is one text: give a list of texts, each of which has a vote")
        if not texts:
            raise ValueError("there is no text, so nobody votes: give at least one")
        if len(texts) >= _MOST_TEXTS:
            raise ValueError(
                f"there are {len(texts)} texts, and counts are exact below {_MOST_TEXTS}: give fewer texts"
            )
        if labels is not None and len(labels) != len(texts):
            raise ValueError(f"there are {len(texts)} texts and {len(labels)} labels: give each text one")
        integer(1, rounds=rounds)
        instance(Callable, "a function from k texts to a tensor [k, d]", embed=embed)
        number(target_epsilon=target_epsilon, target_delta=target_delta)
        if target_delta >= 1 / len(texts):
            raise ValueError(f"target_delta is {target_delta:g}, not below 1/N for {len(texts)} texts: lower it")
        self.rounds, self.target_epsilon, self.target_delta = rounds, target_epsilon, target_delta
        self.labels = sorted(set(labels)) if labels is not None else [""]
        self.noise_multiplier = accounting.calibrate(
            lambda noise: accounting.EventModel(accounting.gaussian(noise)).event(rounds), target_epsilon, target_delta
        )
        self._embed = embed
        self._stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        self._records = torch.cat([self._embedded([text]) for text in texts])
        self._record_labels = torch.tensor([self.labels.index(label) for label in labels or [""] * len(texts)])
        header = {"mechanism": "private votes", "labels": self.labels, "dataset_size": len(texts)}
        header |= {"unit": "example", "adjacency": "add_remove"}
        self.ledger = accounting.Ledger.open_or_create(
            None if output_dir is None else Path(output_dir) / "ledger.jsonl",
            header,
            event=accounting.EventModel(accounting.gaussian(self.noise_multiplier)),
            budget_steps=rounds,
            resume=resume,
        )

    def count(self, candidates: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
        """One round: the noised votes for public candidates, float32 [V] by label. Budget is spent before noise is drawn.

        Raises `fastdp.accounting.BudgetExceeded` once all rounds are spent.
        """
        instance(Mapping, "texts by label", candidates=candidates)
        if unknown := candidates.keys() - set(self.labels):
            raise ValueError(f"no record has the label {min(unknown)!r}: labels are {', '.join(self.labels)}")
        texts = [text for label in candidates for text in candidates[label]]
        if not texts:
            raise ValueError("there are no candidates to vote for: give some under each label")
        places = torch.tensor([self.labels.index(label) for label in candidates for _ in candidates[label]])
        table = self._embedded(texts)
        if not bool(torch.isfinite(table).all()):
            raise ValueError("the embedding of a candidate is not finite: leave it out")
        noised = vote_counts(self._records, self._record_labels, table, places).float()
        self.ledger.record()
        add_noise_(noised, self.noise_multiplier, self._stream)
        return dict(zip(candidates, noised.split([len(candidates[label]) for label in candidates])))

    def _embedded(self, texts: list[str]) -> Tensor:
        """One row for each text: with more, a record would have more votes than are accounted for."""
        given = self._embed(texts)
        instance(Tensor, "a tensor [k, d] for k texts", what_embed_returned=given)
        found = given.detach().float().cpu()
        if found.dim() != 2 or len(found) != len(texts):
            raise ValueError(f"embed gave shape {list(found.shape)} for {len(texts)} texts: return [{len(texts)}, d]")
        return found

    def epsilon(self) -> float:
        """What the rounds so far cost at ``target_delta``; 0 before the first, infinite with a reproducible key."""
        if self.ledger.untouched:
            return 0.0
        return float("inf") if self._stream.reproducible else accounting.epsilon(self.ledger.event(), self.target_delta)

    def card(self) -> accounting.Card:
        spent = self.ledger.spent(STEP)
        return accounting.Card.build(
            mechanism={"name": "private votes", "labels": self.labels},
            unit="example",
            adjacency="add_remove",
            sampling=EVERY_ROUND,
            dataset_size=len(self._records),
            noise_multiplier=self.noise_multiplier,
            event=self.ledger.event(),
            delta=self.target_delta,
            target_epsilon=self.target_epsilon,
            planned_steps=self.rounds,
            spent_steps=spent,
            run_id=self.ledger.run_id,
            ledger_head=self.ledger.head,
            noise_source=accounting.noise_source(self._stream.reproducible, True, self._stream.rounds),
            model={"name": "behind an API", "trained_parameters": 0},
            assumptions=[PUBLIC_CANDIDATES],
            remaining=[accounting.rounded_to_grid(DISTANCE * spent)],
        )

    def close(self) -> None:
        self.ledger.close()
