"""Synthetic rows from a privately tuned model, how near they come to records, and what a classifier learns from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedTokenizerBase

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Examples
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.samples import continue_texts
from fastdp.finetune.tasks import check_tokens, encode_rows, messages_column
from fastdp.tables import Rows
from fastdp.untrusted import encode, load_pretrained, load_pretrained_tokenizer, quote
from fastdp.validate import integer, positive, rate

#: The column of texts that a model writes without a prompt.
TEXT = "text"
#: Texts and their labels.
Labelled = tuple[Sequence[str], Sequence[str]]
#: Attempts at each text of a prompt: some give an empty text, or one that is there already.
_TRIES = 4


@dataclass(frozen=True)
class TokenSampling:
    """How texts are drawn.

    Args:
        temperature: above 0; below 1 keeps to what is likely.
        top_p: share of the probability that a token is drawn from, in (0, 1].
        max_new_tokens: longest text; None for as long as the run's ``max_length`` allows.
        batch_size: texts drawn at once.
        seed: of the draw, which needs no secret: the weights were released.

    Raises ValueError for values out of range.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    max_new_tokens: int | None = None
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        positive(temperature=self.temperature)
        rate(top_p=self.top_p)
        integer(1, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size)


def synthesize(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: FinetuneConfig,
    prompts: Rows | None,
    count: int,
    sampling: TokenSampling,
) -> Iterator[dict[str, str]]:
    """Rows as the model learned to write them: ``count`` different texts for each prompt, fewer where it repeats itself.

    Args:
        model, tokenizer, config: of a run, as `fastdp.audit.saved.load_saved` gives them.
        prompts: public rows with the run's prompt columns; None for a run without.
        count: texts a prompt, at least 1.
        sampling: how they are drawn.

    Raises:
        ConfigError: a run that does not write texts, or prompts that are missing or were not asked for.
        DataError: a prompt column that is missing.
    """
    target = target_column(config, prompts)
    columns = [] if prompts is None else [*(config.prompt_column or ())]
    values = [] if prompts is None else [prompts.column(name, "prompt_column") for name in columns]
    given = [dict(zip(columns, row)) for row in dict.fromkeys(zip(*values))] or [{}]
    starts = _starts(tokenizer, config, columns, given, target)
    check_tokens(Examples([{"input_ids": ids} for ids in starts], 0), model, config)
    # A seed for each batch, by a large step: runs of neighbouring seeds draw no batch alike.
    seeds = itertools.count(1_000_003 * sampling.seed)

    def rows() -> Iterator[dict[str, str]]:
        for fields, ids in zip(given, starts):
            seen: set[str] = set()
            tries = _TRIES * count
            while len(seen) < count and tries > 0:
                size = min(sampling.batch_size, count - len(seen), tries)
                tries -= size
                for text in _texts(model, tokenizer, config, [ids] * size, sampling, seed=next(seeds)):
                    if text and text not in seen:
                        seen.add(text)
                        yield {**fields, target: text}

    return rows()


def near_copies(texts: Sequence[str], records: Sequence[str], words: int = 8) -> list[int]:
    """Which texts hold ``words`` words in a row that a record holds. The answer tells of the records: it is unprotected.

    >>> near_copies(["the cat sat on a mat", "a dog"], ["and then the cat sat on it"], words=4)
    [0]
    """
    known = set(itertools.chain.from_iterable(_word_runs(record, words) for record in records))
    return [index for index, text in enumerate(texts) if not known.isdisjoint(_word_runs(text, words))]


class Judge:
    """A linear classifier on an encoder's mean states: how much training rows are worth.

    Args:
        encoder: folder of a public encoder with its tokenizer.
        test: texts and labels that every classifier is tested on.
        max_length: tokens of a text that are read.
    """

    def __init__(self, encoder: str | Path, test: Labelled, max_length: int = 128) -> None:
        self._tokenizer = load_pretrained_tokenizer(encoder)
        self._model = load_pretrained(AutoModel, str(encoder)).eval()
        self._max_length = max_length
        self._test, self._labels = self.features(test[0]), test[1]

    @torch.no_grad()
    def features(self, texts: Sequence[str], batch_size: int = 64) -> torch.Tensor:
        """Mean last states, scaled to norm 1: float32 ``[len(texts), width]``."""
        # Texts of like length share a batch, so that few tokens are padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found = torch.empty(len(texts), self._model.config.hidden_size)
        for begin in range(0, len(texts), batch_size):
            chosen = order[begin : begin + batch_size]
            batch = encode(
                self._tokenizer,
                [texts[index] for index in chosen],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self._max_length,
            )
            mask = batch["attention_mask"].unsqueeze(2)
            states = self._model(**batch).last_hidden_state
            found[chosen] = (states * mask).sum(1).float() / mask.sum(1).clamp(min=1)
        return F.normalize(found, dim=1)

    def accuracy(self, train: Labelled) -> float:
        """The share of test labels that a classifier trained on these rows finds.

        Raises ValueError for training rows of fewer than two labels.
        """
        labels = sorted(set(train[1]))
        if len(labels) < 2:
            raise ValueError(f"the rows to train on have {len(labels)} label: a classifier needs two at least")
        weight, bias = _fit_logistic_regression(
            self.features(train[0]), torch.tensor([labels.index(label) for label in train[1]])
        )
        predictions = F.linear(self._test, weight, bias).argmax(1).tolist()
        return sum(labels[index] == label for index, label in zip(predictions, self._labels)) / len(predictions)


def _fit_logistic_regression(features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and biases that minimise the mean loss with a small L2 penalty."""
    weight = torch.zeros(int(labels.max()) + 1, features.shape[1], requires_grad=True)
    bias = torch.zeros(len(weight), requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(features, weight, bias), labels) + 1e-4 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def target_column(config: FinetuneConfig, prompts: Rows | None) -> str:
    """The column that the model writes."""
    conversations = prompts is not None and messages_column(prompts, config) or config.messages_column
    if config.task != "causal-lm" or conversations:
        said = "conversations" if conversations else config.task
        raise ConfigError(f"synthesize writes texts, and this run learned {said}: take a run of causal-lm")
    if config.prompt_column and prompts is None:
        names = ", ".join(config.prompt_column)
        raise ConfigError(
            f"this run learned texts from prompts: give --prompts, a public file with the columns {names}"
        )
    if prompts is not None and not config.prompt_column:
        raise ConfigError("this run learned texts without prompts: leave --prompts out")
    return (config.target_column if config.prompt_column else config.text_column) or TEXT


def _starts(
    tokenizer: PreTrainedTokenizerBase,
    config: FinetuneConfig,
    columns: Sequence[str],
    given: Sequence[dict[str, str]],
    target: str,
) -> list[list[int]]:
    """The tokens of each prompt, as in training: those before the target, for which a letter stands."""
    values = {name: [fields[name] for fields in given] for name in columns} | {target: ["a"] * len(given)}
    table = Rows(Path("prompts"), values, range(1, len(given) + 1), word="prompt")
    found = []
    for item in encode_rows(table, tokenizer, config).items:
        first = next((at for at, label in enumerate(item["labels"]) if label != IGNORED), len(item["labels"]))
        # Without a prompt every token has a label: a text then continues the first one.
        found.append(item["input_ids"][:first] or item["input_ids"][:1])
    if not columns and tokenizer.bos_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"the tokenizer of {quote(config.model)} has no token that begins a text: give prompts")
        found = [[tokenizer.eos_token_id]]
    return found


def _texts(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: FinetuneConfig,
    ids: list[list[int]],
    sampling: TokenSampling,
    seed: int,
) -> list[str]:
    """A text that follows each of these lists of tokens, which are equally long."""
    given = torch.tensor(ids, device=next(model.parameters()).device)
    room = max(1, config.max_length - given.shape[1])
    with in_mode(model, training=False), torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        most = min(room, sampling.max_new_tokens or room)
        how: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return continue_texts(model, tokenizer, given, do_sample=True, max_new_tokens=most, **how)


def _word_runs(text: str, words: int) -> Iterator[tuple[str, ...]]:
    split = text.lower().split()
    return (tuple(split[begin : begin + words]) for begin in range(len(split) - words + 1))
