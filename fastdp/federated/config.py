"""The settings of a federated run: one table, which Flower's run config fills and both sides read."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdp.accounting.serialisation import canonical
from fastdp.federated.settings import converted, setting as _setting, types_of

#: From the least to the most that is perturbed.
PERTURBATIONS = ("none", "selective", "all")
CHOICES = {
    "peft": ("bottleneck", "lora"),
    "aggregation": ("mean", "examples"),
    "evaluation": ("server", "clients", "none"),
    "partition": ("iid", "dirichlet", "source", "own"),
    "perturbation": PERTURBATIONS,
    "mechanism": ("local", "metric", "partition", "paper"),
    "budget": ("token", "text"),
}
#: What a resumed run may change without becoming another run.
MAY_CHANGE = ("rounds", "resume", "wait_seconds", "round_seconds", "threads", "device")


@dataclass(frozen=True)
class FederatedConfig:
    """Settings of a run; each is a key of Flower's run config, with dashes. "" and 0 stand for "none" there.

    Raises:
        ValueError: for a setting out of range, or settings that contradict each other.
    """

    model: str = _setting("folder or name of the public pretrained model, on every machine", "")
    train: str = _setting("texts that a simulation shares out: .csv, .tsv, .jsonl, .txt; a SuperNode has its own", "")
    eval: str = _setting("held-out texts for perplexity", "")
    text_column: str = _setting("column with the text", "text")
    output: str = _setting("the server's folder: checkpoint, figures, cards, adapter", "")
    state: str = _setting(
        "simulation: folder for what clients keep (default: beside output); a SuperNode has its own", ""
    )

    rounds: int = _setting("rounds of the run", 3)
    fraction: float = _setting("share of clients that a round samples", 1.0)
    min_clients: int = _setting("fewest connected clients to begin with, and accepted updates for a round to count", 2)
    wait_seconds: float = _setting("how long to wait for clients to connect", 300.0)
    round_seconds: float = _setting("how long a round waits for its clients; later updates are dropped", 3600.0)
    aggregation: str = _setting("mean (equation 7), or examples (weighted by the clients' numbers of examples)", "mean")
    evaluation: str = _setting("where perplexity is computed: server, clients (unprotected) or none", "server")
    max_update_norm: float = _setting("largest L2 norm of an update that is accepted", 1e3)
    max_examples: int = _setting("largest number of examples that a client may claim", 1_000_000)
    resume: bool = _setting("continue the run whose checkpoint is in output", False)

    peft: str = _setting("bottleneck (equation 6) or lora", "bottleneck")
    bottleneck_size: int = _setting("width of bottleneck adapters", 64)
    lora_r: int = _setting("rank of LoRA", 8)
    lora_alpha: float = _setting("scale of LoRA", 16.0)
    local_epochs: int = _setting("passes over its texts that a client makes in a round", 1)
    batch_size: int = _setting("examples in a client's step", 16)
    physical_batch_size: int = _setting("most examples in memory at once", 16)
    learning_rate: float = _setting("step size of the clients' AdamW", 1e-3)
    max_length: int = _setting("longest example in tokens; longer ones are cut", 96)
    eval_batch_size: int = _setting("examples in memory during evaluation", 32)
    seed: int = _setting("seed of partitions, new weights and the order of examples; never of a draw or noise", 0)
    threads: int = _setting("torch threads of a client; 0 leaves torch's choice", 0)
    device: str = _setting("where a client perturbs and trains, and the server evaluates; auto takes a GPU", "auto")

    partition: str = _setting(
        "how simulated clients share train: iid, dirichlet, source; own: each has its own file", "iid"
    )
    dirichlet_alpha: float = _setting("concentration of the Dirichlet partition; small is uneven", 0.5)
    source_column: str = _setting("column naming the source of a row, for dirichlet and source", "")

    perturbation: str = _setting("none, selective (private tokens), or all (every token)", "selective")
    epsilon: float = _setting("budget of each private token, or text", 8.0)
    budget: str = _setting("token or text", "token")
    mechanism: str = _setting("local, metric, partition or paper", "local")
    radius: float = _setting("cap or radius of distances; 0: the table's median distance", 0.0)
    alpha: float = _setting("the paper's factor", 1.0)
    cells: int = _setting("cells of the public partition", 64)
    detector: str = _setting(
        "rules, presidio, or the folder of a token classification model; several joined by ' + '", "rules"
    )
    threshold: float = _setting("least score of a span that counts as private", 0.0)
    names: str = _setting("simulation: file of names that the rules look for, one a line; a SuperNode has its own", "")
    labelled_spans: str = _setting(
        "simulation: labelled spans to measure the detector's misses on; a SuperNode has its own", ""
    )

    client_clip: float = _setting("central DP: bound on a client's update; 0 for none", 0.0)
    client_noise_multiplier: float = _setting("central DP: noise std over client_clip", 0.0)
    client_delta: float = _setting("central DP: delta, well below 1 / clients", 1e-5)

    dpsgd_epsilon: float = _setting("DP-SGD at each client: its budget for the whole run; 0 for none", 0.0)
    dpsgd_delta: float = _setting("DP-SGD at each client: delta", 1e-5)
    dpsgd_max_grad_norm: float = _setting("DP-SGD at each client: bound on one example's gradient", 1.0)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: use one of {', '.join(choices)}")
        for name in ("model", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing: set it in the run config")
        for name in _POSITIVE:
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive and finite")
        for name in ("radius", "client_clip", "client_noise_multiplier", "dpsgd_epsilon", "threads"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        for name in ("client_delta", "dpsgd_delta"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it lies between 0 and 1")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction is {self.fraction}: it must lie in (0, 1]")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}: a score lies between 0 and 1")
        self._check_together()

    def _check_together(self) -> None:
        if (self.client_clip > 0) != (self.client_noise_multiplier > 0):
            raise ValueError("client_clip and client_noise_multiplier go together: central DP clips and adds noise")
        if self.central and self.aggregation == "examples":
            raise ValueError(
                "central DP cannot weight by numbers of examples, which are private and unbounded: use aggregation mean"
            )
        if self.central and self.evaluation == "clients":
            raise ValueError(
                "central DP cannot evaluate at the clients: the perplexities of their texts carry no noise and are in no "
                "epsilon; evaluate at the server, or set evaluation to none"
            )
        if self.partition == "source" and not self.source_column:
            raise ValueError("partition by source needs source_column, the column that names a row's source")

    @property
    def central(self) -> bool:
        """Whether the server clips and adds noise."""
        return self.client_clip > 0

    @classmethod
    def read(cls, run: Mapping[str, Any]) -> FederatedConfig:
        """Settings from Flower's run config; keys may have dashes. For a client's see `fastdp.federated.policy`.

        Raises:
            ValueError: for an unknown setting (with the nearest known one), or a value of another type.
        """
        settings = {key.replace("-", "_"): value for key, value in run.items()}
        for name in settings:
            if name not in _TYPES:
                nearest = difflib.get_close_matches(name, _TYPES, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else f"; known settings: {', '.join(_TYPES)}"
                raise ValueError(f"unknown setting {name!r}{hint}")
        found = cls(**{name: converted(name, value, _TYPES) for name, value in settings.items()})
        if found.evaluation == "server" and not found.eval:
            raise ValueError("evaluation at the server needs eval, a file of held-out texts; or set evaluation to none")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Every setting."""
        return dataclasses.asdict(self)

    def digest(self) -> str:
        """Names the settings a run is made of: equal for runs that may continue each other."""
        kept = {key: value for key, value in self.as_dict().items() if key not in MAY_CHANGE}
        return hashlib.sha256(canonical(kept).encode()).hexdigest()


_POSITIVE = (
    *("rounds", "min_clients", "wait_seconds", "round_seconds", "max_update_norm", "max_examples", "bottleneck_size"),
    *("lora_r", "lora_alpha", "local_epochs", "batch_size", "physical_batch_size", "learning_rate", "max_length"),
    *("eval_batch_size", "dirichlet_alpha", "epsilon", "alpha", "cells", "dpsgd_max_grad_norm"),
)
_TYPES = types_of(FederatedConfig)
