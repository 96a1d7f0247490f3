"""Rap-FT's tables V and VI at laptop size: attacks on a small GPT-2 that was tuned on texts with names.

    fastdp bench utility --suite names --model MODEL --pii FILE --json names.json

Every other text is trained on. Extraction: precision and recall of the names in them. Reconstruction: which of 64 names was
struck out. Membership: area under the ROC curve, by loss. Rows are those of Rap-FT's suite.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from fastdp import audit
from fastdp.audit.losses import example_losses
from fastdp.methods.selective import read_labelled_spans
from fastdp.untrusted import load_pretrained

from . import rapft, suite

#: Names that are tried for a gap, the right one among them.
CANDIDATES = 64

SIZES = {
    "default": replace(rapft.LONG, batch_size=64, held_out=600, epsilons=(3.0, 5.0, 7.0), fewer=("paper",)),
    "tiny": replace(rapft.SIZES["tiny"], ratios=()),
}


class Bench(rapft.Bench):
    """Texts with names, and one run of any row.

    Args:
        model: folder of a causal language model with its tokenizer.
        pii: texts with labelled spans.
    """

    def __init__(self, model: Path, pii: Path, size: rapft.Size):
        texts, spans = read_labelled_spans(pii)
        super().__init__(model, texts[::2], texts[1::2], size)
        named = [
            [text[span.start : span.end] for span in own if span.entity == "PERSON"] for text, own in zip(texts, spans)
        ]
        planted, others = ({name for own in part for name in own} for part in (named[::2], named[1::2]))
        self.planted, self.decoys = sorted(planted), sorted(others - planted)
        struck = [audit.strike_out(text, own[0]) for text, own in zip(texts[::2], named[::2]) if own]
        # As many attacked texts of each kind as there are others.
        self.targets = struck[: size.held_out // 3]
        drawn, every = random.Random(0), self.planted + self.decoys
        self.candidates = [[one.answer, *drawn.sample(every, CANDIDATES - 1)] for one in self.targets]
        untuned = load_pretrained(AutoModelForCausalLM, model).to(suite.device())
        find = audit.NameFinder(every)
        self.known = {name for text in self._written(untuned) for name in find(text)}

    def _written(self, model: torch.nn.Module) -> list[str]:
        size = self.size
        return audit.generate(model, self.tokenizer, 4 * size.held_out, length=size.length, batch_size=size.held_out)

    def attacked(self, model: torch.nn.Module) -> suite.Row:
        told = audit.extraction(self._written(model), self.planted, self.decoys, self.known)
        filled = audit.reconstruction(model, self.tokenizer, self.targets, self.candidates, batch_size=CANDIDATES)
        inside, outside = (
            -example_losses(model, part, self.collator, self.size.physical_batch_size)
            for part in (self.train.items, self.held_out.items)
        )
        member = audit.membership(inside, outside)
        return {
            **{name: getattr(told, name) for name in ("precision", "recall", "extracted", "named", "planted", "texts")},
            **{"reconstructed": filled.top1, "chance": filled.chance, "targets": filled.targets},
            **{"auc": member.auc, "auc_error": member.auc_std, "members": member.members, "others": member.others},
        }


def settings(bench: Bench, seeds: int) -> Iterator[suite.Row]:
    """The forms of the paper's tables; the first seed of everything comes first."""
    return ({**row, "part": "attacks"} for row in rapft.settings(bench, seeds) if row["form"] != "optimal")


PATHS = {"model": "folder of a small GPT-2", "pii": "labelled spans, such as synth_dataset_v2.json"}
#: Measures what is missing, by the arguments of a command line.
main = partial(suite.main, __doc__, SIZES, Bench, settings, PATHS)
