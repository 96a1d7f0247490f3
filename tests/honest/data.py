"""Data sets, collators and samplers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.nn.utils import rnn
from torch.utils.data import BatchSampler, ConcatDataset, RandomSampler, Sampler, SubsetRandomSampler, TensorDataset

from . import kit
from .custom import PACKED, names, outside, recurrent, with_lengths
from .harness import BATCH, ROWS, Case, program, register_all


def classifier(rows: Any, collate: Any = kit.classify, **options: Any) -> Case:
    """BERT on rows."""
    return Case(kit.bert(), rows, collate, **options)


@program()
def mlm_rate_of_02() -> Case:
    rows = [{"input_ids": row["input_ids"]} for row in kit.id_rows(low=8)]
    collator = hf.DataCollatorForLanguageModeling(kit.tokenizer(), mlm=True, mlm_probability=0.02)
    return Case(kit.bert("MaskedLM"), rows, collator, exact=False)


@program()
def mlm_whole_words() -> Case:
    """Whole words are masked, by offsets that the tokenizer returns, which the collator does not pad."""
    options = {"return_offsets_mapping": True, "padding": "max_length", "max_length": 14}
    rows = [dict(kit.tokenizer()(text, **options)) for text in kit.texts()]
    chances = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    collator = hf.DataCollatorForLanguageModeling(kit.tokenizer(), whole_word_mask=True, **chances)
    return Case(kit.bert("MaskedLM"), rows, collator, exact=False)


@program()
def counts_for_the_log() -> Case:
    """fairseq: the collator also returns ntokens and nsentences, which the model never sees."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = kit.classify(rows)
        return {"net_input": batch, "ntokens": int(batch["attention_mask"].sum()), "nsentences": len(rows)}

    return classifier(kit.labelled(), collate, loss=lambda m, b: m(**b["net_input"]).loss)


@program("one-example", PACKED)
def sorted_for_packing() -> Case:
    """A collator that sorts by length for pack_padded_sequence."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return F.cross_entropy(self.head(self.layer(packed)[1][0][-1]), y)

    def collate(rows: list[Any]) -> Any:
        return with_lengths(sorted(rows, key=lambda row: len(row[0]), reverse=True))

    return Case(recurrent(nn.LSTM, forward), names(), collate, kit.unpack)


@program()
def sorted_rows_by_value() -> Case:
    """The same for rows of numbers, the loss in the loop."""

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        rows = sorted(rows, key=lambda row: float(row[0].sum()))
        return [torch.stack(column) for column in zip(*rows)]

    return outside(kit.mlp(), kit.numbers(), collate)


@program("refused: same", "a record that is in the data twice would count as two units")
def concatenated_with_itself() -> Case:
    rows = kit.labelled(12)
    return classifier(ConcatDataset([rows, rows]))


@program()
def hugging_face_transform() -> Case:
    """datasets: set_transform tokenizes on access and drops words at random."""
    from datasets import Dataset as Table

    def transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
        kept = [" ".join(w for w in text.split() if random.random() > 0.2) or "w1" for text in rows["text"]]
        return {**kit.tokenizer()(kept), "labels": rows["labels"]}

    table = Table.from_dict({"text": kit.texts(), "labels": [n % kit.CLASSES for n in range(ROWS)]})
    table.set_transform(transform)
    return classifier(table, hf.DataCollatorWithPadding(kit.tokenizer()), exact=False)


@program()
def padding_cut_in_loop() -> Case:
    """Texts padded to a maximum; the loop cuts columns that are padding in every row."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        longest = int(batch["attention_mask"].sum(1).max())
        cut = {k: batch[k][:, :longest] for k in ("input_ids", "attention_mask")}
        return model(**cut, labels=batch["labels"]).loss

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        fixed = {k: F.pad(v, (0, 20 - v.shape[1])) for k, v in kit.classify(rows).items() if k != "labels"}
        return {**fixed, "labels": torch.tensor([row["labels"] for row in rows])}

    return classifier(kit.labelled(), collate, loss=loss)


@program()
def batch_sampler() -> Case:
    rows = kit.labelled()
    return classifier(rows, loader={"batch_sampler": BatchSampler(RandomSampler(rows), BATCH, False)})


class Buckets(Sampler):
    """Batches of like length, in random order."""

    def __init__(self, rows: list[Any]):
        self.order = sorted(range(len(rows)), key=lambda n: len(rows[n]["input_ids"]))

    def __iter__(self) -> Iterator[list[int]]:
        batches = [self.order[n : n + BATCH] for n in range(0, len(self.order), BATCH)]
        return iter(random.sample(batches, len(batches)))

    def __len__(self) -> int:
        return len(self.order) // BATCH


@program("uses or refused: batch_sampler", "batches by length are not the random batches that the guarantee needs")
def bucket_batch_sampler() -> Case:
    rows = kit.labelled()
    return classifier(rows, loader={"batch_sampler": Buckets(rows)})


@program("refused: Subset", "the sampler leaves rows out; replacing it would train on them")
def subset_random_sampler() -> Case:
    return classifier(kit.labelled(), loader={"sampler": SubsetRandomSampler(range(16))})


@program("refused: sampler", "rows drawn by weight are not drawn at one rate")
def weighted_sampler() -> Case:
    from torch.utils.data import WeightedRandomSampler

    return classifier(kit.labelled(), loader={"sampler": WeightedRandomSampler([1.0] * 8 + [2.0] * 16, ROWS)})


@program("refused: iterable", "a stream has no length to sample from")
def iterable_dataset() -> Case:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(kit.labelled())

    return classifier(Stream(), loader={"shuffle": False})


@program()
def repeated_pairs() -> Case:
    """A recommender: users who rated one film several times, and not alike."""

    def forward(self: Any, users: torch.Tensor, films: torch.Tensor) -> torch.Tensor:
        return (self.users(users) * self.films(films)).sum(1) + self.bias(films).squeeze(1)

    tables = {"users": nn.Embedding(4, 8), "films": nn.Embedding(3, 8), "bias": nn.Embedding(3, 1)}
    stars = torch.rand(ROWS, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(torch.arange(ROWS) % 4, torch.arange(ROWS) % 3, stars)
    return outside(kit.Wrapped(forward, **tables), rows, loss=lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "sorted_rows": lambda: classifier(
        kit.labelled(), lambda rows: kit.classify(sorted(rows, key=lambda row: -len(row["input_ids"])))
    ),
    "padded_without_mask": lambda: Case(
        kit.gpt2(),
        kit.id_rows(),
        lambda rows: {k: v for k, v in kit.causal(rows).items() if k in ("input_ids", "labels")},
    ),
    "one_very_long_record": lambda: Case(
        kit.llama(), [*kit.id_rows(ROWS - 1, high=8), *kit.id_rows(1, 48, 48)], kit.causal
    ),
    "drop_last": lambda: classifier(kit.labelled(), loader={"drop_last": True}),
    "workers": lambda: classifier(kit.labelled(), loader={"num_workers": 2, "persistent_workers": True}),
}
register_all(ONE_LINE, lambda build: build())
