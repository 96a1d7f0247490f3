"""The tasks of a run: what its rows hold for each, and which model answers."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedTokenizerBase

from fastdp.data import Examples, causal_examples, classification_examples, sequence_examples, word_examples
from fastdp.finetune.chat import chat_examples, conversation_text
from fastdp.finetune.config import ConfigError, FinetuneConfig, listed
from fastdp.tables import DataError, Rows
from fastdp.untrusted import quote

#: Encodes a table; the last argument is whether text is privatized token by token (see `fastdp.methods.encoding`).
Encode = Callable[[Rows, PreTrainedTokenizerBase, FinetuneConfig, bool], Examples]


@dataclasses.dataclass(frozen=True)
class Task:
    """What a task is to the libraries, and how its examples are made.

    Attributes:
        auto: transformers' class of models with the task's head.
        heads: transformers' table of these, by configuration.
        peft: peft's name of the task.
        encode: makes its examples.
        problem: what a classifier of transformers is told that its labels are.
    """

    auto: Any
    heads: Any
    peft: str
    encode: Encode
    problem: str | None = None

    def arguments(self, config: FinetuneConfig) -> dict[str, Any]:
        """What the model's class is told besides its weights' name: the labels, or that there is one number."""
        found: dict[str, Any] = {} if self.problem is None else {"problem_type": self.problem}
        if config.task == "regression":
            return found | {"num_labels": 1}
        if config.labels:
            found["id2label"] = dict(enumerate(config.labels))
            found["label2id"] = {label: index for index, label in enumerate(config.labels)}
        return found


def encode_rows(
    table: Rows, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, ends: int | None = None
) -> Examples:
    """Examples of a table as the settings say; ``ends`` is a token that each must hold equally often (see `check_model_name`).

    Raises:
        DataError: a column that is missing, or a row that does not fit it, or has no token.
        ConfigError: a tokenizer that does not fit the task.
    """
    try:
        examples = TASKS[config.task].encode(table, tokenizer, config, config.method in ("sap", "selective"))
    except DataError:
        raise
    except ValueError as error:
        raise ConfigError(f"{config.model} does not fit {config.task}: {error}") from None
    added = tokenizer(*["a"] * (2 if config.text_pair_column else 1))["input_ids"].count(ends)
    if ends is not None and not added:
        raise ConfigError(
            f"{config.model} finds the end of a text by its end token, which its tokenizer does not add: use the tokenizer that "
            "belongs to it"
        )
    for index, item in enumerate(examples.items):
        if not all(value for value in item.values() if isinstance(value, list)):
            raise DataError(f"{table.place(index)}: its text is empty, without a single token: leave the row out")
        if ends is not None and item["input_ids"].count(ends) != added:
            raise DataError(
                f"{table.place(index)}: its text spells out the token by which this model finds a text's end: leave the "
                "row out"
            )
    return examples


def check_tokens(examples: Examples, model: Any, config: FinetuneConfig) -> None:
    """Refuse a token that the model has no row for, which would end a run in the middle. Raises ConfigError."""
    rows = model.get_input_embeddings().weight.shape[0]
    highest = max(max(value) for item in examples.items for value in item.values() if isinstance(value, list))
    if highest >= rows:
        raise ConfigError(
            f"the tokenizer of {config.model} makes token {highest}, but its model has {rows} tokens: use its own tokenizer"
        )


def cut_note(examples: Examples, table: Rows, config: FinetuneConfig) -> str | None:
    """How many examples of a table were cut; None if none was."""
    if not examples.truncated:
        return None
    return (
        f"{examples.truncated} of {len(examples)} examples of {table.path} are longer than {config.max_length} tokens and were "
        "cut (max_length)"
    )


def record_texts(table: Rows, config: FinetuneConfig) -> list[str]:
    """All text of each record that the model may see, as one."""
    if config.task == "token-classification":
        return [" ".join(words) for words in table.lists(_text_column(table, config), "text_column", str.split)]
    if messages := messages_column(table, config):
        return [conversation_text(value) for value in table.values(messages, "messages_column")]
    if config.prompt_column and config.target_column:
        columns = [prompts(table, config), table.column(config.target_column, "target_column")]
    else:
        columns = [table.column(_text_column(table, config), "text_column")]
        columns += [table.column(config.text_pair_column, "text_pair_column")] if config.text_pair_column else []
    return ["\n".join(fields) for fields in zip(*columns)]


def messages_column(table: Rows, config: FinetuneConfig) -> str | None:
    """The column of conversations, if the run trains on one."""
    named = config.text_column or config.prompt_column or config.task != "causal-lm" or "text" in table.columns
    return config.messages_column or ("messages" if not named and "messages" in table.columns else None)


def prompts(table: Rows, config: FinetuneConfig) -> list[str]:
    """What the model is given of each row: the prompt columns that are not empty, with the separator between them."""
    columns = [table.column(name, "prompt_column") for name in config.prompt_column or ()]
    return [config.separator.join(filter(None, fields)) if len(fields) > 1 else fields[0] for fields in zip(*columns)]


def invented_label(config: FinetuneConfig, ids: list[int], number: int) -> Any:
    """A label of the task's kind for an example that nobody wrote, the ``number``-th of its batch."""
    classes = max(2, len(config.labels or ()))
    return {
        "classification": number % classes,
        "multi-label": tuple(float((number + label) % 2) for label in range(classes)),
        "regression": float(number),
        "token-classification": [(number + position) % classes for position in range(len(ids))],
    }.get(config.task, ids)


def task_of(settings: Any) -> str:
    """The task that a model was made for, by its configuration of transformers."""
    architecture = (getattr(settings, "architectures", None) or [""])[0]
    task = next((task for ending, task in _ARCHITECTURES.items() if architecture.endswith(ending)), "causal-lm")
    problem = getattr(settings, "problem_type", None)
    return next((name for name, other in TASKS.items() if problem and other.problem == problem), task)


_ARCHITECTURES = {
    "ForSequenceClassification": "classification",
    "ForTokenClassification": "token-classification",
    "ForConditionalGeneration": "seq2seq",
}


def _text_column(table: Rows, config: FinetuneConfig) -> str:
    if config.text_column:
        return config.text_column
    others = [name for name in table.columns if config.task == "causal-lm" or name != config.label_column]
    if "text" in others or len(others) != 1:
        return "text"
    if not others[0].isidentifier():
        warnings.warn(f"{table.path}: its only column, {quote(others[0])}, is taken as the text", stacklevel=2)
    return others[0]


def _causal(table: Rows, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, literal: bool) -> Examples:
    if messages := messages_column(table, config):
        if literal:
            raise ValueError(f"{config.method} perturbs texts, not conversations: name text_column")
        return chat_examples(tokenizer, table, messages, config.max_length)
    if not (config.prompt_column and config.target_column):
        texts = table.column(_text_column(table, config), "text_column")
        return causal_examples(tokenizer, texts, config.max_length, literal=literal)
    targets = table.column(config.target_column, "target_column")
    return causal_examples(tokenizer, targets, config.max_length, prompts(table, config), config.separator, literal)


def _sequences(table: Rows, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, literal: bool) -> Examples:
    targets = table.column(str(config.target_column), "target_column")
    return sequence_examples(tokenizer, prompts(table, config), targets, config.max_length)


def _texts(read: Callable[[Rows, FinetuneConfig], list[Any]]) -> Encode:
    """Examples of a text, or two, and the label that ``read`` finds."""

    def encode(table: Rows, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, literal: bool) -> Examples:
        texts = table.column(_text_column(table, config), "text_column")
        pairs = table.column(config.text_pair_column, "text_pair_column") if config.text_pair_column else None
        return classification_examples(tokenizer, texts, read(table, config), config.max_length, pairs, literal)

    return encode


def _classes(table: Rows, config: FinetuneConfig) -> list[int]:
    values = table.column(config.label_column, "label_column")
    return [_class_of(value, row, table, config) for row, value in enumerate(values)]


def _sets(table: Rows, config: FinetuneConfig) -> list[tuple[float, ...]]:
    found = []
    for row, values in enumerate(table.lists(config.label_column, "label_column", _split_labels)):
        chosen = {_class_of(value, row, table, config) for value in values}
        found.append(tuple(float(label in chosen) for label in range(len(config.labels or []))))
    return found


def _numbers(table: Rows, config: FinetuneConfig) -> list[float]:
    found = []
    for row, value in enumerate(table.column(config.label_column, "label_column")):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise DataError(f"{table.place(row)}: label {value!r} is not a number of float32, which regression needs")
        found.append(number)
    return found


def _words(table: Rows, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, literal: bool) -> Examples:
    words = table.lists(_text_column(table, config), "text_column", str.split)
    tags = table.lists(config.label_column, "label_column", str.split)
    for at, (row, own) in enumerate(zip(words, tags)):
        if len(row) != len(own):
            raise DataError(
                f"{table.place(at)}: {len(row)} words and {len(own)} labels: each word needs one of its own"
            )
    labels = [[_class_of(tag, row, table, config) for tag in own] for row, own in enumerate(tags)]
    return word_examples(tokenizer, words, labels, config.max_length)


def _split_labels(text: str) -> list[str]:
    return listed(text) if text.strip() else []


def _class_of(label: str, row: int, table: Rows, config: FinetuneConfig) -> int:
    """The number of a label. Raises DataError, with the row's place, for one that the settings do not list."""
    labels = config.labels or []
    if label not in labels:
        raise DataError(f"{table.place(row)}: label {label!r} is not one of labels: {', '.join(labels)}")
    return labels.index(label)


_CAUSAL = (hf.AutoModelForCausalLM, hf.MODEL_FOR_CAUSAL_LM_MAPPING, "CAUSAL_LM")
_SEQUENCES = (hf.AutoModelForSeq2SeqLM, hf.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, "SEQ_2_SEQ_LM")
_TEXTS = (hf.AutoModelForSequenceClassification, hf.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "SEQ_CLS")
_WORDS = (hf.AutoModelForTokenClassification, hf.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "TOKEN_CLS")

TASKS = {
    "causal-lm": Task(*_CAUSAL, _causal),
    "seq2seq": Task(*_SEQUENCES, _sequences),
    "classification": Task(*_TEXTS, _texts(_classes), "single_label_classification"),
    "multi-label": Task(*_TEXTS, _texts(_sets), "multi_label_classification"),
    "regression": Task(*_TEXTS, _texts(_numbers), "regression"),
    "token-classification": Task(*_WORDS, _words),
}
