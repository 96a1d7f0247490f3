"""The settings of a fine-tuning run: one table, which the YAML file, the command's flags and the checks all read."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import fastdp.files as files


class ConfigError(ValueError):
    """A setting that is unknown, missing or out of range; the message says which and what to write instead."""


CHOICES = {
    "task": ("causal-lm", "classification", "multi-label", "regression", "token-classification", "seq2seq"),
    "peft": ("full", "lora", "dora", "bitfit", "bottleneck", "prompt", "ia3"),
    "method": ("dpsgd", "rapft", "frost", "ewft", "sap"),
    "sampling": ("poisson", "shuffled"),
    "schedule": ("constant", "linear", "cosine"),
    "precision": ("float32", "bfloat16"),
}

#: The tasks that some settings belong to.
PROMPTED = ("causal-lm", "seq2seq")
PAIRED = ("classification", "multi-label", "regression")
LABELLED = ("classification", "multi-label", "token-classification")
_BELONGS = {
    **dict.fromkeys(("prompt_column", "target_column"), PROMPTED),
    "text_pair_column": PAIRED,
    "labels": LABELLED,
}
#: Methods that perturb the text itself, and the tasks whose text they know how to perturb whole.
_PERTURBED = {"ewft": ("causal-lm", *PAIRED), "sap": ("causal-lm", *PAIRED)}


def _setting(help: str, default: Any = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass
class FinetuneConfig:
    """Settings of `fastdp finetune`; each is a key of the YAML file and, with dashes, a flag."""

    model: str | None = _setting("folder or name of a Hugging Face model")
    train: str | None = _setting("training data: .csv, .tsv, .jsonl, .parquet, .txt or a saved data set folder")
    eval: str | None = _setting("held-out data of the same form; without it nothing is evaluated")
    output: str | None = _setting("folder for everything the run writes")
    task: str = _setting(", ".join(CHOICES["task"]), "causal-lm")

    text_column: str | None = _setting(
        "column with the text (by default: text, or the only column); token-classification: a list of words, or text with "
        "spaces between them"
    )
    text_pair_column: str | None = _setting("classification, multi-label, regression: column with a second text")
    prompt_column: str | None = _setting("causal-lm, seq2seq: column the model is given; only the target is learned")
    target_column: str | None = _setting("causal-lm, seq2seq: column to be learned from the prompt")
    label_column: str = _setting(
        "column with the label; regression: a number; multi-label: a list, or labels with commas between them; "
        "token-classification: a label for each word",
        "label",
    )
    labels: list[str] | None = _setting(
        "every possible label, as in negative,positive or ['0', '1']; they count as public (not for regression)"
    )
    separator: str = _setting("causal-lm: text between prompt and target", "\n")
    max_length: int = _setting(
        "longest example in tokens (seq2seq: of prompt, and of target); longer ones are cut", 128
    )

    peft: str = _setting(", ".join(CHOICES["peft"]), "lora")
    target_modules: list[str] | None = _setting(
        "modules that lora, dora, bottleneck or ia3 adapt (by default: by model)"
    )
    lora_r: int = _setting("rank of LoRA and DoRA", 8)
    lora_alpha: float = _setting("scale of LoRA and DoRA", 16)
    lora_dropout: float = _setting("dropout of LoRA and DoRA", 0.0)
    bottleneck_size: int = _setting("width of bottleneck adapters", 64)
    prompt_tokens: int = _setting("number of soft prompt tokens", 20)

    epsilon: float | None = _setting("privacy budget to spend; inf trains without privacy")
    delta: float = _setting("probability that the guarantee may fail; keep it well below 1 / examples", 1e-5)
    large_delta: bool = _setting("allow a delta of 1 / examples or more, which may publish a whole record", False)
    method: str = _setting(", ".join(CHOICES["method"]), "dpsgd")
    method_options: dict[str, Any] | None = _setting("arguments of the method, as in {irrelevance_ratio: 0.7}")
    public_overlap: int = _setting(
        "records that a public file of method_options may share with train: confirmed public", 0
    )
    max_grad_norm: float = _setting("bound on one example's gradient", 1.0)
    private_metrics: float | None = _setting(
        "share of epsilon that releases held-out curves with noise, which may be shown (by default none is released)"
    )
    sampling: str = _setting("poisson (accounted with amplification) or shuffled (without)", "poisson")

    epochs: float = _setting("expected passes over the data", 3)
    batch_size: int = _setting("expected examples in a step", 256)
    physical_batch_size: int = _setting("most examples in memory at once", 16)
    learning_rate: float = _setting("step size of AdamW", 1e-3)
    schedule: str = _setting("constant, linear or cosine", "constant")
    warmup: float = _setting("share of the steps over which the learning rate rises", 0.0)
    weight_decay: float = _setting("weight decay of AdamW", 0.0)
    precision: str = _setting("float32, or bfloat16 for autocast", "float32")
    gradient_checkpointing: bool = _setting("recompute activations to save memory", False)
    device: str = _setting("auto, cpu, cuda, cuda:1, ...", "auto")
    seed: int = _setting("seed of new weights and dropout; never of noise or sampling", 0)
    checkpoint_every: int = _setting("steps between checkpoints", 20)
    eval_batch_size: int = _setting("examples in memory during evaluation", 32)
    samples: int = _setting("texts or answers of the trained model to keep for `fastdp report`", 3)

    def check(self) -> None:
        """Check each setting on its own and against the others.

        Raises:
            ConfigError: naming the first setting that does not hold.
        """
        for name, what in (("model", "a model"), ("train", "training data"), ("output", "an output folder")):
            if not getattr(self, name):
                raise ConfigError(f"{name} is missing: name {what} in the config or with --{name}")
        if self.epsilon is None and self.method != "sap":
            raise ConfigError("epsilon is missing: state a privacy budget such as 8, or inf to train without privacy")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.epsilon is not None and not self.epsilon > 0:
            raise ConfigError(f"epsilon must be greater than 0, not {self.epsilon}")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta must lie between 0 and 1, not {self.delta}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be greater than 0, not {value}")
        for name in ("public_overlap", "samples"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name, limit in (("warmup", 1.0), ("lora_dropout", 1.0), ("weight_decay", math.inf)):
            if not 0 <= getattr(self, name) < limit:
                raise ConfigError(f"{name} must be at least 0 and below {limit:g}, not {getattr(self, name)}")
        if self.private_metrics is not None:
            if not self.eval:
                raise ConfigError("private_metrics releases curves of held-out data: name some with eval")
            if not 0 < self.private_metrics < (self.epsilon or 0) < math.inf:
                raise ConfigError(
                    f"private_metrics must lie between 0 and epsilon, which it is a share of, not be {self.private_metrics}"
                )
        self._check_task()

    def _check_task(self) -> None:
        for name, tasks in _BELONGS.items():
            if getattr(self, name) and self.task not in tasks:
                raise ConfigError(f"{name} belongs to {', '.join(tasks)}; this run has task: {self.task}")
        if (self.prompt_column is None) != (self.target_column is None):
            raise ConfigError("prompt_column and target_column go together: set both, or text_column alone")
        if self.prompt_column and self.text_column:
            raise ConfigError("set either text_column, or prompt_column and target_column, not both")
        if self.task == "seq2seq" and not self.prompt_column:
            raise ConfigError("seq2seq needs prompt_column, which the encoder reads, and target_column, to be learned")
        if self.task in LABELLED:
            if len(set(self.labels or ())) < 2:
                raise ConfigError(
                    "labels must list every possible label, as in labels: [negative, positive]; they count as public, "
                    "so they are not collected from the private data"
                )
            assert self.labels is not None
            if len(set(self.labels)) != len(self.labels):
                raise ConfigError(f"labels holds a label twice: {', '.join(self.labels)}")
        if self.task == "token-classification" and self.peft == "prompt":
            raise ConfigError("peft cannot put soft prompts before words that have labels: choose lora or another peft")
        if self.task not in _PERTURBED.get(self.method, (self.task,)):
            raise ConfigError(
                f"{self.method} would leave the target or the words' labels of {self.task} unperturbed: choose another method"
            )

    def save(self, path: str | Path) -> None:
        """Write every setting as YAML; `load_config` reads it back."""
        files.write(path, yaml.safe_dump(dataclasses.asdict(self), sort_keys=False))


_POSITIVE = (
    *("max_length", "lora_r", "lora_alpha", "bottleneck_size", "prompt_tokens", "max_grad_norm", "epochs"),
    *("batch_size", "physical_batch_size", "learning_rate", "checkpoint_every", "eval_batch_size"),
)

_HINTS = typing.get_type_hints(FinetuneConfig)


def setting_type(name: str) -> type:
    """The type of a setting apart from None: str, int, float, bool, list or dict."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    return typing.get_origin(hint) or hint


def _convert(name: str, value: Any) -> Any:
    kind = setting_type(name)
    if value is None:
        return None
    try:
        if kind is list:
            return listed(value)
        if kind is dict:
            loaded = yaml.safe_load(value) if isinstance(value, str) else value
            if not isinstance(loaded, dict):
                raise ValueError
            return loaded
        if kind is bool:
            if not isinstance(value, bool):
                raise ValueError
            return value
        if isinstance(value, (bool, list, dict)):
            raise ValueError
        if kind is int and int(value) != float(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError, yaml.YAMLError):
        wanted = {
            str: "text",
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            list: "a list",
            dict: "a mapping such as {name: value}",
        }[kind]
        raise ConfigError(f"{name} must be {wanted}, not {value!r}") from None


def listed(value: Any) -> list[str]:
    """Of a flag or a field of a file: entries with commas between them, or a list as YAML and JSON write it.

    Raises ValueError for a list that is not closed, or holds lists.
    """
    if not isinstance(value, str):
        return [str(item) for item in value]
    if not value.strip().startswith("["):
        return [item.strip() for item in value.split(",")]
    try:
        loaded = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(value) from None
    if not isinstance(loaded, list) or any(isinstance(item, (list, dict)) for item in loaded):
        raise ValueError
    return [str(item) for item in loaded]


def load_config(path: str | Path | None, overrides: dict[str, Any] | None = None) -> FinetuneConfig:
    """Settings from a YAML file (None: the defaults), then from `overrides`; those that are None are left alone.

    Raises:
        ConfigError: for a file that cannot be read, an unknown setting (with the nearest known one) or a wrong type.
    """
    settings: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f", line {mark.line + 1}" if mark else ""
            raise ConfigError(f"{path}{where}: not valid YAML ({getattr(error, 'problem', error)})") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} must hold settings as `name: value` lines")
        settings = loaded
    for name in settings:
        if name not in _HINTS:
            nearest = difflib.get_close_matches(str(name), _HINTS, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f"; known settings: {', '.join(_HINTS)}"
            raise ConfigError(f"{path}: unknown setting {name!r}{hint}")
    settings |= {name: value for name, value in (overrides or {}).items() if value is not None}
    return FinetuneConfig(**{name: _convert(name, value) for name, value in settings.items()})
