"""The model of a run: loading it, choosing what is trained, and writing weights that load elsewhere."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

import fastdp.untrusted as untrusted
from fastdp.accounting.card import remove_base_path
from fastdp.finetune.config import PAIRED, ConfigError, FinetuneConfig
from fastdp.finetune.tasks import TASKS
from fastdp.integrations.adapters import BottleneckConfig, fix_lora_projections, train_biases_only
from fastdp.untrusted import FolderRejected, load_pretrained
from fastdp.validate import first_line

#: The folder of a run's weights: of an adapter, and of a whole model.
ADAPTER_FOLDER, MODEL_FOLDER = "adapter", "model"
HEADS = ("classifier", "score", "pre_classifier", "classification_head")
#: Of peft's task types, those whose head must be pretrained too.
_PRETRAINED_HEAD = ("CAUSAL_LM", "SEQ_2_SEQ_LM")


def load_tokenizer(config: FinetuneConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, which must be able to pad: with its end token if it has no padding token.

    Raises:
        ConfigError: when the model's folder has no usable tokenizer.
    """
    _check_folder(config.model)
    try:
        tokenizer: PreTrainedTokenizerBase = untrusted.load_pretrained_tokenizer(str(config.model))
    except FolderRejected as error:
        raise ConfigError(f"{config.model} is no model that can be loaded: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ConfigError(f"the tokenizer of {config.model} has neither a padding nor an end token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_model_name(config: FinetuneConfig) -> int | None:
    """Refuse a model that does not fit the settings by its own description, before its weights or any data are read.

    Returns:
        The end token of an encoder-decoder that classifies, None of any other model: it reads the state at the last end token,
        and refuses a batch whose texts do not hold equally many.

    Raises:
        ConfigError: when there is none, it was not made for the task, or has fewer positions than the examples need.
    """
    _check_folder(config.model)
    try:
        settings = load_pretrained(AutoConfig, str(config.model))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    if type(settings) not in TASKS[config.task].heads:
        fitting = ", ".join(task for task, entry in TASKS.items() if type(settings) in entry.heads)
        raise ConfigError(f"{config.model} ({settings.model_type}) is no model for {config.task}; it fits {fitting}")
    if config.peft == "prompt" and config.task != "seq2seq" and getattr(settings, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model} takes no soft prompts for {config.task}: choose lora or another peft")
    positions = getattr(settings, "max_position_embeddings", None)
    needed = config.max_length + (config.prompt_tokens if config.peft == "prompt" else 0)
    if positions is not None and needed > positions:
        raise ConfigError(f"{config.model} has {positions} positions, too few for {needed} tokens: lower max_length")
    if config.task == "seq2seq" and getattr(settings, "decoder_start_token_id", None) is None:
        raise ConfigError(
            f"{config.model} does not say what its decoder begins with: set decoder_start_token_id in its config.json"
        )
    reads_end_token = getattr(settings, "is_encoder_decoder", False) and config.task in PAIRED
    return settings.eos_token_id if reads_end_token else None


def load_model(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The pretrained model in float32, with a new head where the task needs one.

    Raises:
        ConfigError: when it cannot be loaded, or is not made for the task.
    """
    return _load(config, tokenizer)[0]


def load_trained(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """`load_model`, ready to be trained: with the adapter or frozen weights of ``peft``. A new head is always trained too.

    Raises:
        ConfigError: also when the kind does not fit the model, with peft's own reason.
    """
    model, new = _load(config, tokenizer)
    if config.peft == "full":
        return model
    try:
        if config.peft == "bitfit":
            train_biases_only(model, also=new)
            return model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*")
            adapted = peft.get_peft_model(model, _peft_config(model, config, new))  # type: ignore[arg-type]
        if config.lora_fixed:
            fix_lora_projections(adapted)
        return adapted
    except (ValueError, TypeError) as error:
        raise ConfigError(f"peft: {config.peft} does not fit {config.model}: {first_line(error)}") from None


def _load(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[nn.Module, list[str]]:
    """The model, and the names of its head's modules: those of `HEADS`, and those that have no pretrained weights."""
    check_model_name(config)
    task = TASKS[config.task]
    torch.manual_seed(config.seed)
    try:
        model, info = load_pretrained(
            task.auto,
            str(config.model),
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **task.arguments(config),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except RuntimeError as error:
        raise ConfigError(f"cannot load {config.model}: {first_line(error)}") from None
    if info["mismatched_keys"]:
        name, has, needs = min(info["mismatched_keys"])
        raise ConfigError(
            f"{config.model} does not fit: its {name} is {list(has)}, not {list(needs)}. "
            "Give the labels that it was trained on, or save model.base_model alone."
        )
    lacking = {name.rpartition(".")[0] for name in info["missing_keys"]}
    heads = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in HEADS}
    if task.peft in _PRETRAINED_HEAD:
        if lacking:
            raise ConfigError(
                f"{config.model} holds no weights of {', '.join(sorted(lacking))}, which {config.task} needs: it was not "
                "pretrained for it"
            )
        heads = set()
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    # A module covers those within it.
    new = sorted(lacking | heads)
    return model, [name for name in new if not any(name.startswith(f"{other}.") for other in new)]


def _peft_config(model: nn.Module, config: FinetuneConfig, new: list[str]) -> peft.PeftConfig:
    task = TASKS[config.task].peft
    targets: Any = config.target_modules
    for target in targets or ():
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            # peft says so only if no target is there.
            raise ValueError(f"no module's name ends in {target!r} (target_modules)")
    whole: Any = {"modules_to_save": new} if new else {}
    if config.peft in ("lora", "dora"):
        return peft.LoraConfig(
            task_type=task,
            r=config.lora_r,
            lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=config.lora_dropout,
            target_modules=targets or "all-linear",
            fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
            use_dora=config.peft == "dora",
            **whole,
        )
    if config.peft == "bottleneck":
        return BottleneckConfig(
            task_type=task,  # type: ignore[arg-type]
            bottleneck_size=config.bottleneck_size,
            target_modules=targets,
            **whole,
        )
    if config.peft == "ia3":
        return peft.IA3Config(
            task_type=task, target_modules=targets, feedforward_modules=[] if targets else None, **whole
        )
    return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=config.prompt_tokens, **whole)  # type: ignore[arg-type]


def save_weights(model: nn.Module, tokenizer: PreTrainedTokenizerBase, output: Path) -> Path:
    """Write an adapter to `output`/adapter, or a whole model to `output`/model, beside its tokenizer.

    Either loads without fastdp, in peft or in transformers; a bottleneck alone needs `import fastdp` first. The folder is there
    whole or not at all.

    Raises:
        OSError: when it cannot be written.
    """
    adapted = isinstance(model, peft.PeftModel)
    folder = output / (ADAPTER_FOLDER if adapted else MODEL_FOLDER)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=output))
    try:
        # "auto" would ask the model hub whether the vocabulary was resized; here it never is.
        model.save_pretrained(str(aside), **({"save_embedding_layers": False} if adapted else {}))  # type: ignore[operator]
        tokenizer.save_pretrained(aside)
        remove_base_path(aside)
        # peft's README quotes the base model's path; the card's own page takes its place.
        (aside / "README.md").unlink(missing_ok=True)
        aside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except Exception as error:
        # Each library has an error of its own for a disk that is full.
        raise OSError(
            f"{folder} cannot be written ({first_line(error)}): make room, then go on with --resume"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def trained_names(model: nn.Module) -> list[str]:
    """Names of the parameters that require gradients now; a method may freeze some of them later."""
    return [name for name, p in model.named_parameters() if p.requires_grad]


def kept_names(model: nn.Module) -> list[str]:
    """Names of the parameters that a checkpoint needs: those that are trained, and LoRA's random ones that are frozen."""
    return [name for name, p in model.named_parameters() if p.requires_grad or ".lora_" in name]


def trained_state(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Copies of these parameters on the CPU, by name."""
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
