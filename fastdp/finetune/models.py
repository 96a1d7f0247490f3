"""The model of a run: loading it, choosing what is trained, and writing weights that load elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D

from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.integrations.adapters import BottleneckConfig, train_biases_only

HEADS = ("classifier", "score", "pre_classifier", "classification_head")


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, which must be able to pad: with its end token if it has no padding token.

    Raises:
        ConfigError: when the model's folder has no usable tokenizer.
    """
    _check_folder(config.model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config.model} has no tokenizer that can be loaded: {_first_line(error)}") from None
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"the tokenizer of {config.model} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The pretrained model in float32, with a new classification head where the task needs one.

    Raises:
        ConfigError: when it cannot be loaded, or has fewer positions than the examples need.
    """
    arguments: dict[str, Any] = {"dtype": torch.float32}
    loader: Any = AutoModelForCausalLM
    if config.task == "classification":
        assert config.labels is not None
        loader = AutoModelForSequenceClassification
        arguments["id2label"] = dict(enumerate(config.labels))
        arguments["label2id"] = {label: index for index, label in enumerate(config.labels)}
    torch.manual_seed(config.seed)
    try:
        model = loader.from_pretrained(config.model, **arguments)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load {config.model}: {_first_line(error)}") from None
    positions = getattr(model.config, "max_position_embeddings", None)
    needed = config.max_length + (config.prompt_tokens if config.peft == "prompt" else 0)
    if positions is not None and needed > positions:
        raise ConfigError(f"{config.model} has {positions} positions, too few for {needed} tokens: lower max_length")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model


def choose_trained(model: nn.Module, config: FinetuneConfig) -> nn.Module:
    """Apply the run's kind of fine-tuning; a new classification head is always trained as well.

    Raises:
        ConfigError: when the kind does not fit the model, with peft's own reason.
    """
    if config.peft == "full":
        return model
    try:
        if config.peft == "bitfit":
            train_biases_only(model, also=HEADS if config.task == "classification" else ())
            return model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
            return peft.get_peft_model(model, _peft_config(model, config))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"peft: {config.peft} does not fit {config.model}: {_first_line(error)}") from None


def _peft_config(model: nn.Module, config: FinetuneConfig) -> peft.PeftConfig:
    task = "CAUSAL_LM" if config.task == "causal-lm" else "SEQ_CLS"
    targets: Any = config.target_modules
    if config.peft == "lora":
        return peft.LoraConfig(
            task_type=task,
            r=config.lora_r,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=config.lora_dropout,
            target_modules=targets or "all-linear",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        )
    if config.peft == "bottleneck":
        return BottleneckConfig(
            task_type=task,  # type: ignore[arg-type]
            bottleneck_size=config.bottleneck_size,
            target_modules=targets,
        )
    if config.peft == "ia3":
        return peft.IA3Config(task_type=task, target_modules=targets, feedforward_modules=[] if targets else None)
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=config.prompt_tokens)  # type: ignore[arg-type]


def save_weights(model: nn.Module, tokenizer: PreTrainedTokenizerBase, output: Path) -> Path:
    """Write an adapter to `output`/adapter, or a whole model to `output`/model, beside its tokenizer.

    Either loads without fastdp, in peft or in transformers; a bottleneck alone needs `import fastdp` first.
    """
    if isinstance(model, peft.PeftModel):
        folder = output / "adapter"
        # "auto" would ask the model hub whether the vocabulary was resized; here it never is.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        folder = output / "model"
        model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def trained_names(model: nn.Module) -> list[str]:
    """The parameters that are trained just now; a method may freeze some of them later."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def trained_state(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """These parameters by name, on the CPU: what a checkpoint needs besides the pretrained model."""
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach().cpu().clone() for name in names}


def restore_trained(model: nn.Module, state: dict[str, torch.Tensor], names: Sequence[str]) -> None:
    """Put back what `trained_state` gave.

    Raises:
        ConfigError: when the checkpoint is of a model with other trained parameters.
    """
    parameters = dict(model.named_parameters())
    if {name: parameters[name].shape for name in names} != {name: tensor.shape for name, tensor in state.items()}:
        raise ConfigError("the checkpoint is of another model: its trained parameters differ from this run's")
    with torch.no_grad():
        for name, tensor in state.items():
            parameters[name].copy_(tensor)


def _check_folder(name: str | None) -> None:
    path = Path(str(name))
    looks_like_path = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") > 1
    if looks_like_path and not path.is_dir():
        raise ConfigError(f"there is no model folder {name}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
