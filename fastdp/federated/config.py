"""The settings of a federated run: one table, which Flower's run config fills and both sides read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastdp.settings import check, convert_value, setting, suggest_name, types_of
from fastdp.untrusted import quote

#: From the least to the most that is perturbed.
PERTURBATIONS = ("none", "selective", "all")
#: Most characters of a setting: a client logs what the server sends.
_LONGEST_TEXT = 4096
#: What a resumed run may change without becoming another run.
MAY_CHANGE = ("rounds", "resume", "wait_seconds", "round_seconds", "threads", "device")


@dataclass(frozen=True)
class FederatedConfig:
    """Settings of a run; each is a key of Flower's run config, with dashes. "" and 0 stand for "none" there.

    Raises:
        ValueError: for a setting out of range, or settings that contradict each other.
    """

    model: str = setting("folder or name of the public pretrained model, on every machine", "")
    train: str = setting("texts that a simulation shares out: .csv, .tsv, .jsonl, .txt; a SuperNode has its own", "")
    eval: str = setting("held-out texts for perplexity", "")
    text_column: str = setting("column with the text", "text")
    output: str = setting("the server's folder: checkpoint, figures, cards, adapter", "")
    state: str = setting(
        "simulation: folder for what clients keep (default: beside output); a SuperNode has its own", ""
    )

    rounds: int = setting("rounds of the run", 3, above=0, most=1 << 16)
    fraction: float = setting("share of clients that a round samples", 1.0, above=0, most=1)
    min_clients: int = setting(
        "fewest connected clients to begin with, and accepted updates for a round to count", 2, above=0
    )
    wait_seconds: float = setting("how long to wait for clients to connect", 300.0, above=0)
    round_seconds: float = setting("how long a round waits for its clients; later updates are dropped", 3600.0, above=0)
    aggregation: str = setting(
        "mean (equation 7), or examples (weighted by the clients' numbers of examples)",
        "mean",
        among=("mean", "examples"),
    )
    evaluation: str = setting("where perplexity is computed: server or none", "server", among=("server", "none"))
    max_update_norm: float = setting("largest L2 norm of an update that is accepted", 1e3, above=0)
    max_examples: int = setting("largest number of examples that a client may claim", 1_000_000, above=0)
    resume: bool = setting("continue the run whose checkpoint is in output", False)

    peft: str = setting("bottleneck (equation 6) or lora", "bottleneck", among=("bottleneck", "lora"))
    bottleneck_size: int = setting("width of bottleneck adapters", 64, above=0, most=1 << 12)
    lora_r: int = setting("rank of LoRA", 8, above=0, most=1 << 12)
    lora_alpha: float = setting("scale of LoRA", 16.0, above=0)
    local_epochs: int = setting("passes over its texts that a client makes in a round", 1, above=0, most=1 << 10)
    batch_size: int = setting("examples in a client's step", 16, above=0, most=1 << 16)
    physical_batch_size: int = setting("most examples in memory at once", 16, above=0, most=1 << 16)
    learning_rate: float = setting("step size of the clients' AdamW", 1e-3, above=0)
    max_length: int = setting("longest example in tokens; longer ones are cut", 96, above=0, most=1 << 20)
    eval_batch_size: int = setting("examples in memory during evaluation", 32, above=0, most=1 << 16)
    seed: int = setting("seed of partitions, new weights and the order of examples; never of a draw or noise", 0)
    threads: int = setting("torch threads of a client; 0 leaves torch's choice", 0, least=0, most=1024)
    device: str = setting("where a client perturbs and trains, and the server evaluates; auto takes a GPU", "auto")

    partition: str = setting(
        "iid: simulated clients share train evenly, at random; own: each has its own file", "iid", among=("iid", "own")
    )

    perturbation: str = setting(
        "none, selective (private tokens), or all (every token)", "selective", among=PERTURBATIONS
    )
    epsilon: float = setting("budget of each private token, or text", 8.0, above=0)
    budget: str = setting("token or text", "token", among=("token", "text"))
    mechanism: str = setting(
        "local, typed or paper; partition is replaced by local", "local", among=("local", "typed", "paper", "partition")
    )
    radius: float = setting("cap or radius of distances; 0: the table's median distance", 0.0, least=0)
    alpha: float = setting("the paper's factor", 1.0, above=0)
    cells: int = setting("of the partition of the last release; without effect", 64, above=0)
    replacement: str = setting(
        "typed: tokens of a type are drawn uniformly, or as the public model expects them (model)",
        "uniform",
        among=("uniform", "model"),
    )
    learn_replaced: bool = setting("learn replaced tokens too, as the paper does; otherwise they are only read", False)
    detector: str = setting(
        "rules, presidio, or the folder of a token classification model; several joined by ' + '", "rules"
    )
    threshold: float = setting("least score of a span that counts as private", 0.0, least=0, most=1)
    names: str = setting("simulation: file of names that the rules look for, one a line; a SuperNode has its own", "")
    labelled_spans: str = setting(
        "simulation: labelled spans to measure the detector's misses on; a SuperNode has its own", ""
    )

    client_clip: float = setting("central DP: bound on a client's update; 0 for none", 0.0, least=0)
    client_noise_multiplier: float = setting("central DP: noise std over client_clip", 0.0, least=0)
    client_delta: float = setting("central DP: delta, well below 1 / clients", 1e-5, above=0, below=1)

    dpsgd_epsilon: float = setting("DP-SGD at each client: its budget for the whole run; 0 for none", 0.0, least=0)
    dpsgd_delta: float = setting("DP-SGD at each client: delta", 1e-5, above=0, below=1)
    dpsgd_max_grad_norm: float = setting("DP-SGD at each client: bound on one example's gradient", 1.0, above=0)

    def __post_init__(self) -> None:
        for name in ("model", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing: set it in the run config")
        if self.evaluation == "clients":
            raise ValueError(
                "evaluation at clients was removed, as losses of their texts left without noise: use server"
            )
        check(self)
        if (self.client_clip > 0) != (self.client_noise_multiplier > 0):
            raise ValueError("client_clip and client_noise_multiplier go together: central DP clips and adds noise")
        if self.central and self.aggregation == "examples":
            raise ValueError(
                "central DP cannot weight by numbers of examples, which are private and unbounded: use aggregation mean"
            )

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
                raise ValueError(f"unknown setting {quote(name)}{suggest_name(name, _TYPES)}")
        for name, value in settings.items():
            if isinstance(value, str) and not (value.isprintable() and len(value) <= _LONGEST_TEXT):
                raise ValueError(f"{name} is {quote(value)}: write one line of at most {_LONGEST_TEXT} characters")
        found = cls(**{name: convert_value(name, value, _TYPES) for name, value in settings.items()})
        if found.evaluation == "server" and not found.eval:
            raise ValueError("evaluation at the server needs eval, a file of held-out texts; or set evaluation to none")
        return found

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_TYPES = types_of(FederatedConfig)
