"""The settings of a fine-tuning run: one table, which the YAML file, the command's flags and the checks all read."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import fastdp.files as files
from fastdp.settings import TYPE_WORDS, check, choices_of, setting, suggest_name, types_of
from fastdp.tables import DataError, check_encoding
from fastdp.untrusted import MAX_YAML, parse_yaml, quote, read_text


class ConfigError(ValueError):
    """A setting that is unknown, missing or out of range; the message says which and what to write instead."""


#: What some settings belong to.
PROMPTED = ("causal-lm", "seq2seq")
PAIRED = ("classification", "multi-label", "regression")
LABELLED = ("classification", "multi-label", "token-classification")
_BELONGS = {
    **dict.fromkeys(("prompt_column", "target_column"), ("task", PROMPTED)),
    "messages_column": ("task", ("causal-lm",)),
    "text_pair_column": ("task", PAIRED),
    "labels": ("task", LABELLED),
    "target_modules": ("peft", ("lora", "dora", "bottleneck", "ia3")),
    "lora_fixed": ("peft", ("lora",)),
}
#: Methods that perturb the text itself, and the tasks whose text they know how to perturb whole.
_PERTURBED = {"ewft": ("causal-lm", *PAIRED), "sap": ("causal-lm", *PAIRED), "selective": ("causal-lm",)}
#: What does not go with DP-ZO, and why.
_WITH_GRADIENTS = {
    "max_grad_norm": "bounds gradients, and dpzo clips slopes: set max_slope in method_options",
    "weight_decay": "has no effect with dpzo, which moves weights along one direction: leave it out",
    "gradient_checkpointing": "saves memory of a backward pass, which dpzo does not make: leave it out",
    "capture": "records backward passes, which dpzo does not make: leave it out",
}
#: Methods whose bound is no epsilon of a whole record.
_WITHOUT_EPSILON = ("sap", "selective")


@dataclass
class FinetuneConfig:
    """Settings of `fastdp finetune`; each is a key of the YAML file and, with dashes, a flag."""

    model: str | None = setting("folder or name of a Hugging Face model")
    train: str | None = setting(
        "training data: .csv, .tsv, .json, .jsonl, .parquet or .txt; a folder or a pattern of such files; or a saved data set"
    )
    eval: str | None = setting("held-out data of the same form; without it nothing is evaluated")
    encoding: str = setting("how text files are encoded: utf-8, latin-1, utf-16, ...", "utf-8")
    output: str | None = setting("folder for everything the run writes")
    task: str = setting(
        "",
        "causal-lm",
        among=("causal-lm", "classification", "multi-label", "regression", "token-classification", "seq2seq"),
    )

    text_column: str | None = setting(
        "column with the text (by default: text, or the only column); token-classification: a list of words, or text with "
        "spaces between them"
    )
    text_pair_column: str | None = setting("classification, multi-label, regression: column with a second text")
    prompt_column: list[str] | None = setting(
        "causal-lm, seq2seq: column, or columns, that the model is given; only the target is learned"
    )
    target_column: str | None = setting("causal-lm, seq2seq: column to be learned from the prompt")
    messages_column: str | None = setting(
        "causal-lm: column with a conversation, a list of {role, content}; only assistant turns are learned (by default: "
        "messages, if there is no text column)"
    )
    label_column: str = setting(
        "column with the label; regression: a number; multi-label: a list, or labels with commas between them; "
        "token-classification: a label for each word",
        "label",
    )
    labels: list[str] | None = setting(
        "every possible label, as in negative,positive or ['0', '1']; they count as public (not for regression)"
    )
    separator: str = setting("causal-lm: text behind each prompt column", "\n")
    user_column: str | None = setting(
        "column that names the person of each row, to protect people; batch_size then counts people"
    )
    max_examples_per_user: int | None = setting("rows of one person that are used, with user_column", above=0)
    max_length: int = setting(
        "longest example in tokens (seq2seq: of prompt, and of target); longer ones are cut", 128, above=0
    )

    peft: str = setting("", "lora", among=("full", "lora", "dora", "bitfit", "bottleneck", "prompt", "ia3"))
    target_modules: list[str] | None = setting(
        "modules that lora, dora, bottleneck or ia3 adapt (by default: by model)"
    )
    lora_r: int = setting("rank of LoRA and DoRA", 8, least=1, most=2**16)
    lora_alpha: float = setting("scale of LoRA and DoRA", 16, above=0)
    lora_fixed: bool = setting(
        "LoRA: freeze its first matrix, with orthonormal rows; half the noise, and norms that do not depend on its scale",
        False,
    )
    lora_dropout: float = setting("dropout of LoRA and DoRA", 0.0, least=0, below=1)
    bottleneck_size: int = setting("width of bottleneck adapters", 64, least=1, most=2**16)
    prompt_tokens: int = setting("number of soft prompt tokens", 20, least=1, most=2**16)

    epsilon: float | None = setting("privacy budget to spend; inf trains without privacy", above=0, finite=False)
    delta: float = setting(
        "probability that the guarantee may fail; keep it well below 1 / examples", 1e-5, above=0, below=1
    )
    large_delta: bool = setting("allow a delta of 1 / examples or more, which may publish a whole record", False)
    method: str = setting("", "dpsgd", among=("dpsgd", "dpzo", "rapft", "frost", "ewft", "sap", "selective"))
    method_options: dict[str, Any] | None = setting("arguments of the method, as in {irrelevance_ratio: 0.7}")
    public_overlap: int = setting(
        "records that a public file of method_options may share with train: confirmed public", 0, least=0
    )
    max_grad_norm: float = setting("bound on one example's gradient", 1.0, least=1e-20, most=1e20)
    private_metrics: float | None = setting(
        "share of epsilon that releases held-out curves with noise, which may be shown (by default none is released)"
    )
    noise_rounds: int = setting(
        "rounds of ChaCha, which draws the noise of steps: 20, or 12, which a GPU draws faster", 20
    )
    sampling: str = setting(
        "poisson (accounted with amplification) or shuffled (without)", "poisson", among=("poisson", "shuffled")
    )

    epochs: float = setting("expected passes over the data", 3, above=0)
    batch_size: int = setting("expected examples in a step", 256, above=0)
    physical_batch_size: int = setting("most examples in memory at once", 16, above=0)
    learning_rate: float = setting("step size of AdamW, or with dpzo of SGD", 1e-3, above=0)
    schedule: str = setting("constant, linear or cosine", "constant", among=("constant", "linear", "cosine"))
    warmup: float = setting("share of the steps over which the learning rate rises", 0.0, least=0, below=1)
    weight_decay: float = setting("weight decay of AdamW", 0.0, least=0)
    precision: str = setting("float32, or bfloat16 for autocast", "float32", among=("float32", "bfloat16"))
    gradient_checkpointing: bool = setting("recompute activations to save memory", False)
    capture: bool | None = setting("on a GPU: record micro-batches and replay them; by default where that is faster")
    shapes: str = setting(
        "public: every micro-batch has the same number of rows, and a length that is a power of two or max_length + 1, so that "
        "no record decides how another's gradient is rounded; slower",
        "own",
        among=("own", "public"),
    )
    device: str = setting("auto, cpu, cuda, cuda:1, ...", "auto")
    seed: int = setting(
        "seed of new weights; never of noise or sampling, and of dropout only without privacy",
        0,
        least=-(2**63),
        below=2**63,
    )
    checkpoint_every: int = setting("steps between checkpoints", 20, above=0)
    eval_batch_size: int = setting("examples in memory during evaluation", 32, above=0)
    samples: int = setting("texts or answers of the trained model to keep for `fastdp report`", 3, least=0)

    def __post_init__(self) -> None:
        if isinstance(self.prompt_column, str):
            self.prompt_column = listed(self.prompt_column)

    @property
    def is_zeroth_order(self) -> bool:
        """Whether steps make no backward pass; without privacy a run trains by AdamW, whatever its method."""
        return self.method == "dpzo" and math.isfinite(self.epsilon or 0)

    def check(self) -> None:
        """Check each setting on its own and against the others.

        Raises:
            ConfigError: naming the first setting that does not hold.
        """
        for name, what in (("model", "a model"), ("train", "training data"), ("output", "an output folder")):
            if not getattr(self, name):
                raise ConfigError(f"{name} is missing: name {what} in the config or with --{name}")
        if self.epsilon is None and self.method not in _WITHOUT_EPSILON:
            raise ConfigError("epsilon is missing: state a privacy budget such as 8, or inf to train without privacy")
        check(self, ConfigError)
        if self.private_metrics is not None:
            if not self.eval:
                raise ConfigError("private_metrics releases curves of held-out data: name some with eval")
            if not 0 < self.private_metrics < (self.epsilon or 0) < math.inf:
                raise ConfigError(
                    f"private_metrics must lie between 0 and epsilon, which it is a share of, not be {self.private_metrics}"
                )
        try:
            check_encoding(self.encoding)
        except DataError as error:
            raise ConfigError(str(error)) from None
        self._check_users()
        if self.noise_rounds not in (20, 12):
            raise ConfigError(f"noise_rounds is {self.noise_rounds}: it must be 20 or 12")
        if self.noise_rounds != 20 and self.method in _PERTURBED:
            raise ConfigError(f"noise_rounds is of the noise of steps, and {self.method} adds none there: leave it out")
        if self.shapes == "public" and self.method in _PERTURBED:
            raise ConfigError("shapes: public needs a method that clips rows: choose dpsgd, dpzo, rapft or frost")
        if self.method == "dpzo":
            self._check_zeroth_order()
        self._check_task()

    def _check_zeroth_order(self) -> None:
        if self.shapes != "public":
            raise ConfigError(
                "with dpzo, one record's shape may move what others add by many bounds: set shapes: public"
            )
        for name, reason in _WITH_GRADIENTS.items():
            if getattr(self, name) not in (None, FinetuneConfig.__dataclass_fields__[name].default):
                raise ConfigError(f"{name} {reason}")

    def _check_users(self) -> None:
        if (self.user_column is None) != (self.max_examples_per_user is None):
            raise ConfigError("user_column and max_examples_per_user go together: set both, or neither")
        if self.user_column is None:
            return
        if self.method in ("ewft", *_WITHOUT_EPSILON):
            raise ConfigError(f"user_column does not fit {self.method}, which protects texts: choose another method")
        if self.private_metrics is not None:
            raise ConfigError(
                "private_metrics counts held-out rows, not people: leave it out, or leave user_column out"
            )
        if (self.max_examples_per_user or 0) > self.physical_batch_size:
            raise ConfigError(
                f"max_examples_per_user {self.max_examples_per_user} exceeds physical_batch_size {self.physical_batch_size}: "
                "lower the first, or raise the second"
            )

    def _check_task(self) -> None:
        for name, (other, values) in _BELONGS.items():
            if getattr(self, name) and getattr(self, other) not in values:
                raise ConfigError(
                    f"{name} belongs to {', '.join(values)}; this run has {other}: {getattr(self, other)}"
                )
        if (self.prompt_column is None) != (self.target_column is None):
            raise ConfigError("prompt_column and target_column go together: set both, or text_column alone")
        if self.prompt_column and self.text_column:
            raise ConfigError("set either text_column, or prompt_column and target_column, not both")
        if self.messages_column:
            if self.prompt_column or self.text_column:
                raise ConfigError("set either messages_column, or the columns of texts, not both")
            if self.method in _PERTURBED:
                raise ConfigError(
                    f"{self.method} perturbs texts, not conversations: set text_column, or another method"
                )
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
        files.write(path, yaml.dump(dataclasses.asdict(self), Dumper=_Dumper, sort_keys=False))


class _Dumper(yaml.SafeDumper):
    """Writes a text with line ends on one line, as "\\n"."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


#: The type of each setting apart from None, and the words that some are chosen from.
TYPES, CHOICES = types_of(FinetuneConfig), choices_of(FinetuneConfig)


def _convert(name: str, value: Any) -> Any:
    kind = TYPES[name]
    if value is None:
        return None
    try:
        if kind is list:
            return listed(value)
        if kind is dict:
            loaded = parse_yaml(value) if isinstance(value, str) else value
            if not isinstance(loaded, dict):
                raise ValueError
            return loaded
        if isinstance(value, (list, dict)) or isinstance(value, bool) != (kind is bool):
            raise ValueError
        if (kind is int and isinstance(value, float) and not value.is_integer()) or "\0" in str(value):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name} must be {TYPE_WORDS[kind]}, not {quote(value)}") from None


def listed(value: Any) -> list[str]:
    """Of a flag or a field of a file: entries with commas between them, or a list as YAML and JSON write it.

    Raises ValueError for a list that is not closed, or holds lists.
    """
    if not isinstance(value, str):
        return [str(item) for item in value]
    if not value.strip().startswith("["):
        return [item.strip() for item in value.split(",")]
    loaded = parse_yaml(value, as_text=True)
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
            text = read_text(path, MAX_YAML)
        except OSError as error:
            hint = ": name a YAML file; --resume goes with --output" * Path(path).is_dir()
            raise ConfigError(f"cannot read the config {path}: {error.strerror}{hint}") from None
        except ValueError as error:
            wrong = "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            raise ConfigError(f"cannot read the config: {wrong}") from None
        try:
            loaded, written = parse_yaml(text), parse_yaml(text, as_text=True)
        except ValueError as error:
            hint = "" if Path(path).suffix.lower() in (".yaml", ".yml") else ": name data with --train"
            raise ConfigError(f"{path}, {error}{hint}") from None
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} must hold settings as `name: value` lines")
        # Of lists the words themselves: YAML takes no, 007 and 1:30 for false, 7 and 90.
        lists = {name for name, value in loaded.items() if TYPES.get(name) is list and isinstance(value, list)}
        settings = {name: written[name] if name in lists else value for name, value in loaded.items()}
    for name in settings:
        if name not in TYPES:
            raise ConfigError(f"{path}: unknown setting {quote(name)}{suggest_name(str(name), TYPES)}")
    settings |= {name: value for name, value in (overrides or {}).items() if value is not None}
    return FinetuneConfig(**{name: _convert(name, value) for name, value in settings.items()})
