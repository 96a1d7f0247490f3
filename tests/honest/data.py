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
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from .custom import PACKED, names, outside, recurrent, with_lengths
from .harness import BATCH, ROWS, Case, program, register
from .kit import (
    CLASSES,
    MEAN,
    Wrapped,
    bert,
    causal,
    classify,
    crossentropy,
    gpt2,
    id_rows,
    keywords,
    labelled,
    llama,
    mlp,
    numbers,
    padded,
    texts,
    tokenizer,
    unlabelled,
    unpack,
)


def classifier(rows: Any, collate: Any = classify, **options: Any) -> Case:
    """BERT on rows."""
    return Case(bert(), rows, collate, **options)


#: MLM collators that mask at random: short texts, and few tokens.
MASKING = {"usual": (0.15, 12), "short_texts": (0.15, 4), "rate_of_02": (0.02, 12), "rate_of_60": (0.6, 8)}


def masking(rate: float, length: int, **options: Any) -> Case:
    """Dynamic masking of BERT."""
    rows = [{"input_ids": row["input_ids"]} for row in id_rows(low=max(3, length - 4), high=length)]
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=True, mlm_probability=rate, **options)
    return Case(bert("MaskedLM"), rows, collator, exact=False)


for _name, (_rate, _length) in MASKING.items():
    register(f"mlm_{_name}", lambda r=_rate, n=_length: masking(r, n))
register("mlm_no_random_replacement", lambda: masking(0.2, 10, mask_replace_prob=1.0, random_replace_prob=0.0))


@program()
def permutation_of_words() -> Case:
    """A collator that drops words at random (BART-like noise)."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        kept = [[t for t in row["input_ids"] if random.random() > 0.1] or row["input_ids"][:1] for row in rows]
        return {
            **unlabelled([{"input_ids": k, "attention_mask": [1] * len(k)} for k in kept]),
            "labels": padded([r["input_ids"] for r in rows], -100),
        }

    from .kit import t5

    return Case(t5(), id_rows(), collate, exact=False)


@program()
def counts_for_the_log() -> Case:
    """fairseq: the collator also returns ntokens and nsentences, which the model never sees."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = classify(rows)
        return {"net_input": batch, "ntokens": int(batch["attention_mask"].sum()), "nsentences": len(rows)}

    return classifier(labelled(), collate, loss=lambda m, b: m(**b["net_input"]).loss)


@program()
def counts_as_a_tensor() -> Case:
    """The same count as a tensor without rows."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = classify(rows)
        return {**batch, "num_tokens": batch["attention_mask"].sum()}

    loss = lambda m, b: m(**{k: v for k, v in b.items() if k != "num_tokens"}).loss  # noqa: E731
    return classifier(labelled(), collate, loss=loss)


@program()
def ids_and_texts_beside() -> Case:
    """Identifiers, texts and the longest length travel with the batch."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        batch = classify(rows)
        longest = max(len(row["input_ids"]) for row in rows)
        return {"inputs": batch, "ids": [row["id"] for row in rows], "longest": longest}

    rows = [{**row, "id": f"document {n}"} for n, row in enumerate(labelled())]
    return classifier(rows, collate, loss=lambda m, b: m(**b["inputs"]).loss)


@program("one-example", PACKED)
def sorted_for_packing() -> Case:
    """A collator that sorts by length for pack_padded_sequence."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        return F.cross_entropy(self.head(self.layer(packed)[1][0][-1]), y)

    def collate(rows: list[Any]) -> Any:
        return with_lengths(sorted(rows, key=lambda row: len(row[0]), reverse=True))

    return Case(recurrent(nn.LSTM, forward), names(), collate, unpack)


@program()
def sorted_rows() -> Case:
    """A collator that sorts rows; any order of a batch is the same to the model."""
    return classifier(labelled(), lambda rows: classify(sorted(rows, key=lambda row: -len(row["input_ids"]))))


@program()
def sorted_rows_by_value() -> Case:
    """The same for rows of numbers, the loss in the loop."""

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        rows = sorted(rows, key=lambda row: float(row[0].sum()))
        return [torch.stack(column) for column in zip(*rows)]

    return outside(mlp(), numbers(), collate)


@program()
def shuffled_rows() -> Case:
    """A collator that shuffles its rows."""
    return classifier(labelled(), lambda rows: classify(random.sample(rows, len(rows))))


@program()
def padded_to_multiple() -> Case:
    """Padding to a multiple of eight."""
    collator = hf.DataCollatorWithPadding(tokenizer(), pad_to_multiple_of=8)
    return classifier(labelled(), collator)


@program()
def padded_without_mask() -> Case:
    """Right padding of a causal model without any mask: padding is behind every token."""
    keep = ("input_ids", "labels")
    return Case(gpt2(), id_rows(), lambda rows: {k: v for k, v in causal(rows).items() if k in keep})


@program()
def one_very_long_record() -> Case:
    """One record is five times as long as the others."""
    return Case(llama(), [*id_rows(ROWS - 1, high=8), *id_rows(1, 48, 48)], causal)


@program()
def one_token_records() -> Case:
    """Some records have two tokens alone."""
    return Case(gpt2(), [*id_rows(4, 2, 2), *id_rows(ROWS - 4)], causal)


@program()
def repeated_records() -> Case:
    """Many records are the same."""
    return classifier([labelled()[n % 3] for n in range(ROWS)])


@program()
def concatenated_and_split() -> Case:
    """ConcatDataset, random_split and Subset."""
    joined = ConcatDataset([labelled(16), labelled(16, seed=1)])
    return classifier(Subset(random_split(joined, [28, 4])[0], range(ROWS)))


@program("refused: same", "a record that is in the data twice would count as two units")
def concatenated_with_itself() -> Case:
    """ConcatDataset([d, d]), to lengthen an epoch."""
    rows = labelled(12)
    return classifier(ConcatDataset([rows, rows]))


@program()
def hugging_face_dataset() -> Case:
    """datasets: map, then with_format('torch')."""
    from datasets import Dataset as Table

    table = Table.from_dict({"text": texts(), "labels": [n % CLASSES for n in range(ROWS)]})
    encode = lambda rows: tokenizer()(rows["text"], padding="max_length", max_length=16)  # noqa: E731
    return classifier(table.map(encode, batched=True, remove_columns=["text"]).with_format("torch"), None)


@program()
def hugging_face_transform() -> Case:
    """datasets: set_transform tokenizes on access and drops words at random."""
    from datasets import Dataset as Table

    def transform(rows: dict[str, list[Any]]) -> dict[str, Any]:
        kept = [" ".join(w for w in text.split() if random.random() > 0.2) or "w1" for text in rows["text"]]
        return {**tokenizer()(kept), "labels": rows["labels"]}

    table = Table.from_dict({"text": texts(), "labels": [n % CLASSES for n in range(ROWS)]})
    table.set_transform(transform)
    return classifier(table, hf.DataCollatorWithPadding(tokenizer()), exact=False)


@program()
def lazy_tokenization() -> Case:
    """A data set that tokenizes on access."""

    class Lazy(Dataset):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {**tokenizer()(texts()[index]), "labels": index % CLASSES}

    return classifier(Lazy(), hf.DataCollatorWithPadding(tokenizer()))


@program()
def tokenized_in_collator() -> Case:
    """The collator tokenizes texts."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        encoded = tokenizer()([text for text, _ in rows], padding=True, return_tensors="pt")
        return {**encoded, "labels": torch.tensor([label for _, label in rows])}

    return classifier([(text, n % CLASSES) for n, text in enumerate(texts())], collate)


@program()
def tokenized_in_loop() -> Case:
    """The collator returns texts; the loop tokenizes them."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        encoded = tokenizer()(list(batch[0]), padding=True, return_tensors="pt")
        return model(**encoded, labels=batch[1]).loss

    return classifier([(text, n % CLASSES) for n, text in enumerate(texts())], None, loss=loss)


@program()
def mask_in_loop() -> Case:
    """The loop makes the attention mask from the ids."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        return model(input_ids=ids, attention_mask=(ids != 0).long(), labels=batch["labels"]).loss

    return classifier(labelled(), loss=loss)


@program()
def normalised_in_loop() -> Case:
    """The loop scales pictures and moves channels."""
    from .kit import convnet, images

    rows = [(x.permute(1, 2, 0).mul(255).byte(), y) for x, y in images()]
    loss = lambda m, b: F.cross_entropy(m(b[0].permute(0, 3, 1, 2) / 127.5 - 1), b[1])  # noqa: E731
    return outside(convnet(), rows, loss=loss, exact=False)


@program()
def one_hot_in_loop() -> Case:
    """The loop turns labels into one-hot targets."""
    return outside(mlp(), numbers(), loss=lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1], CLASSES).to(b[0])))


@program()
def reshaped_in_loop() -> Case:
    """The loop flattens pictures, and copies tensors to a device."""
    from .kit import images

    rows = images(4)
    return outside(mlp(48), rows, loss=lambda m, b: F.cross_entropy(m(b[0].to("cpu").flatten(1)), b[1].to("cpu")))


@program()
def shifted_in_loop() -> Case:
    """One tensor of tokens; the loop cuts inputs and targets out of it."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch[0]
        logits = model(ids[:, :-1]).logits
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1).mean()

    rows = TensorDataset(torch.randint(5, 96, (ROWS, 10)))
    return Case(gpt2(), rows, None, loss, options=MEAN)


@program()
def padding_cut_in_loop() -> Case:
    """Texts padded to a maximum; the loop cuts columns that are padding in every row."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        longest = int(batch["attention_mask"].sum(1).max())
        cut = {k: batch[k][:, :longest] for k in ("input_ids", "attention_mask")}
        return model(**cut, labels=batch["labels"]).loss

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        fixed = {k: F.pad(v, (0, 20 - v.shape[1])) for k, v in classify(rows).items() if k != "labels"}
        return {**fixed, "labels": torch.tensor([row["labels"] for row in rows])}

    return classifier(labelled(), collate, loss=loss)


@program()
def token_types_in_loop() -> Case:
    """The loop adds token types of zeros and position ids."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        return model(**batch, token_type_ids=torch.zeros_like(ids), position_ids=positions).loss

    return classifier(labelled(), loss=loss)


@program()
def drop_last() -> Case:
    """drop_last=True is of no effect, since the sampler is replaced."""
    return classifier(labelled(), loader={"drop_last": True})


@program()
def workers() -> Case:
    """Two persistent workers."""
    return classifier(labelled(), loader={"num_workers": 2, "persistent_workers": True})


@program()
def generator_and_pin() -> Case:
    """A generator of one's own."""
    return classifier(labelled(), loader={"generator": torch.Generator().manual_seed(1)})


@program()
def batch_sampler() -> Case:
    """batch_sampler=BatchSampler(RandomSampler(...))."""
    rows = labelled()
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
    """A batch_sampler that groups like lengths."""
    rows = labelled()
    return classifier(rows, loader={"batch_sampler": Buckets(rows)})


@program("refused: Subset", "the sampler leaves rows out; replacing it would train on them")
def subset_random_sampler() -> Case:
    """SubsetRandomSampler as a split."""
    return classifier(labelled(), loader={"sampler": SubsetRandomSampler(range(16))})


@program("refused: sampler", "rows drawn by weight are not drawn at one rate")
def weighted_sampler() -> Case:
    """WeightedRandomSampler for imbalanced classes."""
    from torch.utils.data import WeightedRandomSampler

    return classifier(labelled(), loader={"sampler": WeightedRandomSampler([1.0] * 8 + [2.0] * 16, ROWS)})


@program("refused: iterable", "a stream has no length to sample from")
def iterable_dataset() -> Case:
    """IterableDataset."""
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(labelled())

    return classifier(Stream(), loader={"shuffle": False})


@program()
def nested_batches() -> Case:
    """Batches of tuples in dictionaries."""

    def collate(rows: list[Any]) -> dict[str, Any]:
        x, lengths, y = with_lengths(rows)
        return {"inputs": (x, {"lengths": lengths}), "target": y}

    def forward(self: Any, inputs: Any, target: torch.Tensor) -> torch.Tensor:
        words = (torch.arange(inputs[0].shape[1])[None] < inputs[1]["lengths"][:, None]).unsqueeze(-1)
        return F.cross_entropy(self.head((self.embed(inputs[0]) * words).sum(1)), target)

    model = Wrapped(forward, embed=nn.Embedding(96, 8), head=nn.Linear(8, CLASSES))
    return Case(model, names(), collate, keywords)


@program()
def pairs_in_one_row() -> Case:
    """A named tuple from the collator."""
    from typing import NamedTuple

    class Batch(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    def collate(rows: list[Any]) -> Batch:
        return Batch(*(torch.stack(column) for column in zip(*rows)))

    case = outside(mlp(), numbers(), collate, lambda m, b: crossentropy(m, (b.x, b.y)))
    case.exact = False
    return case
