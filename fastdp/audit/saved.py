"""Loading what a run left behind: its output folder, or any model's own."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import peft
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

from fastdp.finetune.config import LABELLED, ConfigError, FinetuneConfig, load_config
from fastdp.finetune.folder import CONFIG
from fastdp.finetune.models import load_model, load_tokenizer
from fastdp.finetune.tasks import task_of
from fastdp.integrations.adapters import FEED_FORWARD_OUTPUTS, PEFT_TYPE
from fastdp.settings import check
from fastdp.untrusted import (
    MAX_YAML,
    FolderRejected,
    check_adapter,
    load_pretrained,
    parse_json_object,
    quote,
    read_bytes,
)

#: Longest example, in tokens, for a model that no run has set one for.
_LENGTH = 128
#: Of adapters that runs write. peft knows others, whose configs name further adapters, which it would look for anywhere.
_KINDS = ("LORA", "IA3", "PROMPT_TUNING", PEFT_TYPE)


def load_saved(
    folder: str | Path, overrides: dict[str, Any] | None = None
) -> tuple[nn.Module, PreTrainedTokenizerBase, FinetuneConfig]:
    """A fine-tuned model, its tokenizer, and the settings that say how its data are read.

    The folder is what `fastdp finetune` wrote to (its base model must be where it was), or one of transformers. ``overrides``
    replace the run's own settings, such as ``text_column``; those that are None are left alone.
    """
    folder = Path(folder)
    config = settings_of(folder, overrides)
    if not (folder / CONFIG).exists():
        tokenizer = load_tokenizer(config)
        return load_model(config, tokenizer).eval(), tokenizer, config
    whole, adapter = folder / "model", folder / "adapter"
    if whole.is_dir():
        tokenizer = load_tokenizer(dataclasses.replace(config, model=str(whole)))
        return load_model(dataclasses.replace(config, model=str(whole)), tokenizer).eval(), tokenizer, config
    if not adapter.is_dir():
        raise ConfigError(f"the run in {folder} has written no weights yet: finish it with --resume")
    _check_adapter(adapter)
    tokenizer = load_tokenizer(dataclasses.replace(config, model=str(adapter)))
    base: Any = load_model(config, tokenizer)
    try:
        with warnings.catch_warnings():
            # Otherwise what is attacked, or writes, is the model before training.
            warnings.filterwarnings("error", "Found missing adapter keys")
            return peft.PeftModel.from_pretrained(base, str(adapter), local_files_only=True).eval(), tokenizer, config
    # Whatever peft, or a file's own reader, raises on values that no run writes.
    except Exception as error:
        raise ConfigError(f"the adapter in {adapter} does not fit its model: {quote(str(error), 160)}") from None


def _check_adapter(folder: Path) -> None:
    """Refuse an adapter that peft would look for elsewhere, and a config by which it imports, searches or computes at length."""
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder} holds no adapter_model.safetensors: take the folder that the run wrote")
    try:
        settings = parse_json_object(read_bytes(folder / "adapter_config.json", MAX_YAML))
        check_adapter(settings, FEED_FORWARD_OUTPUTS)
    except FolderRejected as error:
        raise ConfigError(f"{folder}: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} has no adapter_config.json that can be read: {error}") from None
    if settings.get("peft_type") not in _KINDS:
        raise ConfigError(
            f"the adapter in {folder} is of no kind that a run writes: {quote(settings.get('peft_type'))}"
        )


def settings_of(folder: str | Path, overrides: dict[str, Any] | None = None) -> FinetuneConfig:
    """The settings that a folder was trained with, or those that fit a model which no run describes, as for `load_saved`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: name the output of a run, or a model's folder")
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    if os.path.lexists(folder / CONFIG):
        config = load_config(folder / CONFIG, given)
        check(config, ConfigError)
        return config
    config = dataclasses.replace(_of_model(folder), **given)
    if config.task in LABELLED and not config.labels:
        raise ConfigError(f"{config.task} needs every possible label: name them with --labels, commas between")
    return config


def _of_model(folder: Path) -> FinetuneConfig:
    """Settings for a model that no run describes: the task from its architecture, the labels from its own names."""
    try:
        settings = load_pretrained(AutoConfig, folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is neither a run nor a model: {str(error).splitlines()[0]}") from None
    task = task_of(settings)
    length = min(_LENGTH, getattr(settings, "max_position_embeddings", None) or _LENGTH)
    return FinetuneConfig(
        model=str(folder),
        task=task,
        labels=[str(settings.id2label[i]) for i in range(settings.num_labels)] if task in LABELLED else None,
        max_length=length,
    )
