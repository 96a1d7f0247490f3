"""Reading the files people have, and turning rows into the examples a model trains on.

One row is one example, and one example is the unit that a private run protects: a row too long for the model is cut,
never split in two, because its halves would be protected half as well.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from fastdp.methods.encoding import ADDED, encode_private

IGNORED = -100
PARQUET = ".parquet"


class DataError(ValueError):
    """A data file that cannot be used: the message names the file and, where there is one, the line."""


@dataclass(frozen=True)
class Rows:
    """Rows of a file: `rows[i]` maps a column to its value and began at line `lines[i]` of `path`."""

    path: Path
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    lines: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str, role: str) -> list[str]:
        """The values of one column as text.

        Raises:
            DataError: when there is no such column, or a row holds null or a nested value in it.
        """
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r} ({role}); its columns are {', '.join(self.columns)}")
        values = []
        for row, line in zip(self.rows, self.lines):
            value = row.get(name)
            if value is None or isinstance(value, (dict, list)):
                what = "nothing" if value is None else "a nested value"
                raise DataError(f"{self.path}, line {line}: column {name!r} ({role}) holds {what}, not text")
            values.append(str(value))
        return values


def read_rows(path: str | Path) -> Rows:
    """Read a CSV, TSV, JSONL, Parquet or plain text file, or a folder written by `datasets.Dataset.save_to_disk`.

    CSV and TSV begin with a header; TSV fields are taken literally (no quoting), as GLUE writes them. A plain text file
    has one example a line, in the column "text"; blank lines are skipped. All are UTF-8.

    Raises:
        DataError: a file that is missing, empty, of an unknown kind, or has a row that cannot be read (with its line).
    """
    path = Path(path)
    if path.is_dir():
        rows = _read_saved_dataset(path)
    elif not path.exists():
        raise DataError(f"there is no file {path}")
    elif path.suffix.lower() == PARQUET:
        rows = _read_parquet(path)
    elif path.suffix.lower() not in _READERS:
        kinds = ", ".join([*_READERS, PARQUET])
        raise DataError(f"{path} is of no known kind: expected {kinds} or a saved data set folder")
    else:
        rows = _READERS[path.suffix.lower()](path, _decode(path))
    if not len(rows):
        raise DataError(f"{path} holds no rows")
    return rows


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text (byte {content[error.start]:#04x})") from None


def _read_delimited(path: Path, text: str, **dialect: Any) -> Rows:
    # The module's own limit of 131,072 characters is below what a document takes; it holds for the process.
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), **dialect)
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    header: list[str] = []
    begin = 1
    try:
        for fields in reader:
            if not header:
                header = fields
                if len(set(header)) != len(header):
                    raise DataError(f"{path}, line 1: two columns have the same name")
            elif fields:
                if len(fields) != len(header):
                    raise DataError(f"{path}, line {begin}: {len(fields)} fields where the header has {len(header)}")
                rows.append(dict(zip(header, fields)))
                lines.append(begin)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}, line {begin}: {error}") from None
    return Rows(path, tuple(header), rows, lines)


def _read_csv(path: Path, text: str) -> Rows:
    return _read_delimited(path, text, strict=True)


def _read_tsv(path: Path, text: str) -> Rows:
    return _read_delimited(path, text, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_jsonl(path: Path, text: str) -> Rows:
    rows, lines = [], []
    columns: dict[str, None] = {}
    # Not splitlines(): JSON strings may hold U+2028 and other characters it would split at.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object with named fields, not {line.strip()[:30]!r}")
        columns.update(dict.fromkeys(row))
        rows.append(row)
        lines.append(number)
    return Rows(path, tuple(columns), rows, lines)


def _read_text(path: Path, text: str) -> Rows:
    numbered = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return Rows(path, ("text",), [{"text": line} for _, line in numbered], [number for number, _ in numbered])


_READERS = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".txt": _read_text,
}


def _read_parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'fastdp[trainer]'") from None
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is no Parquet file that can be read: {str(error).splitlines()[0]}") from None
    return Rows(path, tuple(table.column_names), table.to_pylist(), range(1, len(table) + 1))


def _read_saved_dataset(path: Path) -> Rows:
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = ", ".join(str(path / name) for name in json.loads(splits.read_text())["splits"])
        raise DataError(f"{path} holds several data sets; name one of them: {names}")
    if not (path / "dataset_info.json").exists():
        raise DataError(f"{path} is a folder but no data set saved by datasets.Dataset.save_to_disk")
    try:
        from datasets import load_from_disk
    except ImportError:
        raise DataError(f"reading {path} needs the datasets package: pip install 'fastdp[trainer]'") from None
    saved = load_from_disk(str(path))
    return Rows(path, tuple(saved.column_names), list(saved), range(1, len(saved) + 1))


class Examples(Dataset):
    """Encoded examples, each a dict of lists of token ids; a map-style data set.

    `truncated` counts those that were cut to fit; `lengths` holds the tokens of each, by which a private loader sorts.
    """

    def __init__(self, items: list[dict[str, Any]], truncated: int) -> None:
        self.items = items
        self.truncated = truncated
        self.lengths = [len(item["input_ids"]) for item in items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def causal_examples(
    tokenizer: PreTrainedTokenizerBase,
    targets: Sequence[str],
    max_length: int,
    prompts: Sequence[str] | None = None,
    separator: str = "\n",
    literal: bool = False,
) -> Examples:
    """Examples for a causal model: begin token, prompt and separator where there are prompts, target, end token.

    With prompts, only the target and the end token carry labels; without, every token does. An example longer than
    `max_length` loses the end of its target, and the beginning of its prompt where that alone takes over half the room.

    ``literal`` is for text that is privatized token by token: special tokens that it spells out are letters, and the items
    say under ``special_tokens_mask`` which tokens stand for none of it (see `fastdp.methods.encoding`).
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(texts: Sequence[str]) -> list[list[int]]:
        if literal:
            return encode_private(tokenizer, texts)["input_ids"]
        return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    encoded_targets = encode(targets)
    encoded_prompts = encode([prompt + separator for prompt in prompts]) if prompts is not None else None
    items, truncated = [], 0
    for index, target in enumerate(encoded_targets):
        prompt = encoded_prompts[index] if encoded_prompts is not None else []
        body = target + end
        if len(start) + len(prompt) + len(body) > max_length:
            truncated += 1
            room = max(max_length // 2, max_length - len(start) - len(body))
            prompt = prompt[max(0, len(prompt) - room) :]
        prefix = start + prompt
        ids = (prefix + body)[:max_length]
        hidden = len(prefix) if prompts is not None else 0
        labels = [IGNORED] * hidden + ids[hidden:]
        items.append({"input_ids": ids, "labels": labels})
        if literal:
            added = [1] * len(start) + [0] * (len(prompt) + len(target)) + [1] * len(end)
            items[-1][ADDED] = added[:max_length]
    return Examples(items, truncated)


def classification_examples(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    labels: Sequence[int],
    max_length: int,
    pairs: Sequence[str] | None = None,
    literal: bool = False,
) -> Examples:
    """Examples for sequence classification, encoded as the model expects; `labels` are class indices.

    ``literal`` is as in `causal_examples`.
    """
    arguments = (list(texts),) if pairs is None else (list(texts), list(pairs))
    cut: Mapping[str, Any]
    if literal:
        full = encode_private(tokenizer, texts, pairs, special=True)
        cut = encode_private(tokenizer, texts, pairs, special=True, truncation=True, max_length=max_length)
    else:
        full = tokenizer(*arguments, verbose=False)
        cut = tokenizer(*arguments, truncation=True, max_length=max_length)
    keys = [key for key in cut if key != "attention_mask"]
    items = [{key: cut[key][i] for key in keys} | {"labels": label} for i, label in enumerate(labels)]
    truncated = sum(len(ids) > max_length for ids in full["input_ids"])
    return Examples(items, truncated)


@dataclass(frozen=True)
class Collator:
    """Pads examples on the right to the longest of the batch, or to ``length`` tokens where lengths must not show.

    The attention mask covers what was there before.

    The mask comes from lengths, not from comparing with the padding token, which in GPT-2's vocabulary is also the end
    token and carries a label.
    """

    pad_token: int
    length: int | None = None

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """[B] examples -> input_ids, attention_mask and other token fields int64 [B, T]; labels [B, T] or [B]."""
        longest = self.length or max(len(example["input_ids"]) for example in examples)
        fill = {"input_ids": self.pad_token, "labels": IGNORED}

        def padded(values: list[int], key: str) -> list[int]:
            return values + [fill.get(key, 0)] * (longest - len(values))

        batch = {
            key: torch.tensor([padded(e[key], key) if isinstance(e[key], list) else e[key] for e in examples])
            for key in examples[0]
        }
        batch["attention_mask"] = torch.tensor([padded([1] * len(e["input_ids"]), "mask") for e in examples])
        return batch
