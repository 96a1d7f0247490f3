"""Reading the files people have, and turning rows into the examples a model trains on.

One row is one example, and one example is the unit that a private run protects: a row too long for the model is cut,
never split in two, because its halves would be protected half as well.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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

    def lists(self, name: str, role: str, split: Callable[[str], list[str]]) -> list[list[str]]:
        """The values of one column as lists of text: lists as they are, and text (or a number) as ``split`` cuts it.

        Raises:
            DataError: as `column`; and for a list that holds null, lists or mappings, or a text that ``split`` refuses.
        """
        texts = [row.get(name) for row in self.rows]
        flat = [{**row, name: "" if isinstance(value, list) else value} for row, value in zip(self.rows, texts)]
        found = []
        plain = Rows(self.path, self.columns, flat, self.lines).column(name, role)
        for value, text, line in zip(texts, plain, self.lines):
            if not isinstance(value, list):
                try:
                    found.append(split(text))
                except ValueError:
                    raise DataError(
                        f"{self.path}, line {line}: column {name!r} ({role}) holds {text!r}, not a list"
                    ) from None
                continue
            if any(item is None or isinstance(item, (dict, list)) for item in value):
                raise DataError(
                    f"{self.path}, line {line}: column {name!r} ({role}) holds a list of more than words and numbers"
                )
            found.append([str(item) for item in value])
        return found


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


_READERS: dict[str, Callable[[Path, str], Rows]] = {
    ".csv": partial(_read_delimited, strict=True),
    ".tsv": partial(_read_delimited, delimiter="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".txt": _read_text,
}


def _read_parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'fastdp-lm[trainer]'") from None
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
        raise DataError(f"reading {path} needs the datasets package: pip install 'fastdp-lm[trainer]'") from None
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
    labels: Sequence[int | float | tuple[float, ...]],
    max_length: int,
    pairs: Sequence[str] | None = None,
    literal: bool = False,
) -> Examples:
    """Examples with one label each, encoded as the model expects: a class index, a number, or a tuple of 0 and 1 by class.

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


def word_examples(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[list[str]], labels: Sequence[list[int]], max_length: int
) -> Examples:
    """Examples with a label for each word, which its first token carries; the words are joined by spaces.

    Args:
        labels: class indices, as many as words.

    Raises:
        ValueError: for a tokenizer that cannot say where in the text its tokens are.
    """
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer cannot say to which word a token belongs: a tokenizer.json is needed")
    texts = [" ".join(row) for row in words]
    full = tokenizer(texts, verbose=False)["input_ids"]
    cut = tokenizer(texts, truncation=True, max_length=max_length, return_offsets_mapping=True)
    items = []
    for ids, offsets, row, own in zip(cut["input_ids"], cut["offset_mapping"], words, labels):
        # The word of each character and of the space behind it. A token may begin with the space before its word: so its end
        # decides.
        word_at = [index for index, word in enumerate(row) for _ in range(len(word) + 1)]
        unseen: dict[int | None, int] = dict(enumerate(own))
        at = [word_at[end - 1] if end > begin else None for begin, end in offsets]
        items.append({"input_ids": ids, "labels": [unseen.pop(index, IGNORED) for index in at]})
    return Examples(items, sum(len(ids) > max_length for ids in full))


def sequence_examples(
    tokenizer: PreTrainedTokenizerBase, sources: Sequence[str], targets: Sequence[str], max_length: int
) -> Examples:
    """Examples for an encoder and a decoder: a source, and a target that ends with the end token; each at most `max_length`."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    given: list[dict[str, Any]] = [{"text": list(sources)}, {"text_target": list(targets)}]
    full = [tokenizer(**texts, verbose=False)["input_ids"] for texts in given]
    cut = [tokenizer(**texts, truncation=True, max_length=max_length)["input_ids"] for texts in given]
    items = [
        {"input_ids": source, "labels": target if target[-1:] == end else target[: max_length - len(end)] + end}
        for source, target in zip(*cut)
    ]
    return Examples(items, sum(max(map(len, pair)) > max_length for pair in zip(*full)))


@dataclass(frozen=True)
class Collator:
    """Pads lists on the right, each to the longest of the batch, or to ``length`` tokens where lengths must not show.

    The attention mask covers what was there before. Numbers, and tuples, which are as long in every example, stay as they are.

    The mask comes from lengths, not from comparing with the padding token, which in GPT-2's vocabulary is also the end
    token and carries a label.
    """

    pad_token: int
    length: int | None = None

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """[B] examples -> input_ids, attention_mask and other token fields int64 [B, T]; labels [B, T], [B] or [B, classes]."""
        fill = {"input_ids": self.pad_token, "labels": IGNORED}

        def padded(values: list[Any], fill: int) -> list[Any]:
            if not isinstance(values[0], list):
                return values
            longest = self.length or max(map(len, values))
            return [value + [fill] * (longest - len(value)) for value in values]

        batch = {
            key: torch.tensor(padded([example[key] for example in examples], fill.get(key, 0))) for key in examples[0]
        }
        batch["attention_mask"] = torch.tensor(padded([[1] * len(example["input_ids"]) for example in examples], 0))
        return batch
