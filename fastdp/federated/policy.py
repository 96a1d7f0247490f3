"""What an organisation decides for itself, in its SuperNode's node config: private paths, and floors that no run goes below.

The run's settings come from the server, which a client need not trust with its texts. A client therefore trains by the
stricter of the run's settings and its own policy, and not at all where neither is the stricter.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdp.federated.config import PERTURBATIONS, FederatedConfig
from fastdp.settings import check, convert_value, setting, suggest_name, types_of

#: Names a deployed node's file of settings, for its client app. Users of its machine can replace what Flower hands on.
NODE_FILE = "FASTDP_NODE_FILE"
#: From the weakest. Both give epsilon between any two tokens; ``typed`` tells nothing, epsilon 0, between those of one type.
_MECHANISMS = ("local", "typed")
#: Settings by which Flower marks a simulated client, whose texts belong to the owner of the run: it needs no policy.
_SIMULATED = {"partition_id", "num_partitions"}
#: Detectors of this install. Any other is a model, whose maker may have trained it to leave chosen texts unmarked.
_OWN_DETECTORS = ("rules", "presidio")
_PERTURBATION_SETTINGS = ("epsilon", "mechanism", "budget")
#: What makes a round's work and memory grow without bound, whatever it does for privacy.
_WORK_SETTINGS = ("rounds", "local_epochs", "max_length", "bottleneck_size", "lora_r")
_DETECTOR_SETTINGS = ("detector", "threshold", "names", "labelled_spans")


def client_settings(run: Mapping[str, Any], node: Mapping[str, Any]) -> FederatedConfig:
    """The settings that a client trains by: those of the run config, tightened by the policy in its node config.

    Raises:
        ValueError: for a run config that `FederatedConfig` refuses.
        NodeSettingError: for a node config that `NodePolicy` refuses.
        ClientRefusal: for a run that this client does not take part in.
    """
    policy, found = NodePolicy.read(node), FederatedConfig.read(run)
    return found if policy is None else policy.tighten(found)


def node_settings(handed: Mapping[str, Any]) -> Mapping[str, Any]:
    """A deployed node's settings, from its own file; a simulated client's, as Flower handed them on."""
    path = os.environ.get(NODE_FILE)
    if path is None:
        return handed
    import tomllib  # Python 3.11, which Flower needs too

    return tomllib.loads(Path(path).read_text(encoding="utf-8"))


class ClientRefusal(ValueError):
    """Why a client does not take part, in a sentence that quotes nothing of its texts: the server may read it.

    Raise it only for sentences made of the server's own settings, names of tensors and the client's number. Every other error
    of a client, whoever raised it, is reported by its type alone.
    """


class NodeSettingError(ValueError):
    """A node config that cannot hold. It may quote private paths, so it is for the client's own log alone."""


@dataclass(frozen=True)
class NodePolicy:
    """The settings of one node; each is a key of its node config, with dashes.

    Raises:
        NodeSettingError: for a setting that is missing, out of range, or has no effect beside the others.
    """

    train: str = setting("this node's own texts: .csv, .tsv, .jsonl, .txt", "")
    state: str = setting(
        "folder for draws, ledger and card; one for all runs, since other draws are another release", ""
    )
    text_column: str = setting("column with the text", "text")
    model: str = setting("folder with the run's public model, from a place that you trust", "")
    names: str = setting("file of the organisation's own names, one a line", "")
    labelled_spans: str = setting("labelled spans to measure the detector's misses on, for the card", "")
    threads: int = setting("torch threads; 0 leaves the run's choice", 0, least=0)
    device: str = setting("where this node perturbs and trains; by default the run's choice", "")
    partition_id: int = setting("number of this node; names its folder below state", 0, least=0)
    physical_batch_size: int = setting("most examples in memory at once", 16, above=0)
    rounds: int = setting("most rounds of a run", 1000, above=0)
    local_epochs: int = setting("most passes in a round", 64, above=0)
    max_length: int = setting("most tokens of an example", 1024, above=0)
    bottleneck_size: int = setting("widest bottleneck", 512, above=0)
    lora_r: int = setting("largest rank of LoRA", 512, above=0)

    perturbation: str = setting(
        "least that is perturbed: none, selective (private tokens), or all", "", among=PERTURBATIONS
    )
    epsilon: float = setting("largest budget of a private token, or text", 0.0, above=0)
    mechanism: str = setting(
        "weakest mechanism: local or typed; partition is replaced by local", "local", among=_MECHANISMS
    )
    budget: str = setting("token; or text, which a token's budget does not satisfy", "token", among=("token", "text"))
    detector: str = setting("always asked, beside the run's: rules, presidio, or a folder", "rules")
    threshold: float = setting("largest least score of a span that counts as private", 0.0, least=0, most=1)
    dpsgd_epsilon: float = setting("largest budget of DP-SGD at this node; 0 asks for none", 0.0, least=0)
    dpsgd_delta: float = setting("largest delta of DP-SGD at this node", 1e-5, above=0, below=1)

    @classmethod
    def read(cls, node: Mapping[str, Any]) -> NodePolicy | None:
        """The policy in a node config, whose keys may have dashes; None for a client of a simulation.

        Raises:
            NodeSettingError: for a setting that no node has (with the nearest known one), or of another type, besides what
                the class refuses.
        """
        given = {key.replace("-", "_"): value for key, value in node.items()}
        if given.get("mechanism") == "partition":
            # Settings of the last release: `local` holds among all tokens, so also among those of a cell.
            given = {key: value for key, value in given.items() if key != "cells"} | {"mechanism": "local"}
        if "num_partitions" in given:
            others = sorted(set(given) - _SIMULATED)
            if others:
                raise NodeSettingError(
                    f"num_partitions marks a client of a simulation, which has no {others[0]} of its own: leave "
                    "num_partitions out of the node config"
                )
            return None
        for key in given:
            if key not in _TYPES and key in types_of(FederatedConfig):
                raise NodeSettingError(f"{key} is the run's to set, not a node's: leave it out of the node config")
            if key not in _TYPES:
                raise NodeSettingError(f"a node has no setting {key!r}{suggest_name(key, _TYPES)}")
        try:
            policy = cls(**{key: convert_value(key, value, _TYPES) for key, value in given.items()})
        except ValueError as error:
            raise NodeSettingError(str(error)) from None
        policy._check(given)
        return policy

    def _check(self, given: Mapping[str, Any]) -> None:
        for name, what in (
            ("train", "the file with this node's own texts"),
            ("state", "a folder beside them, the same for all runs, for what must be drawn once alone"),
            ("model", "the folder with the public model, whose tokenizer encodes this node's texts"),
            ("perturbation", f"the least that you allow, one of {', '.join(PERTURBATIONS)}"),
        ):
            if not getattr(self, name):
                raise NodeSettingError(f"{name} is missing: name {what} in the node config")
        check(self, NodeSettingError, only={*given, "perturbation"})
        self._check_effects(given)
        if not Path(self.model).is_dir():
            raise NodeSettingError(f"model is {self.model!r}: name a folder of this machine, which nobody else changes")
        if self.perturbation != "none" and "epsilon" not in given:
            raise NodeSettingError("epsilon is missing: set the largest that you allow in the node config")

    def _check_effects(self, given: Mapping[str, Any]) -> None:
        """Refuse a setting without effect: its owner would count on a protection that is not there."""
        idle: list[tuple[tuple[str, ...], bool, str]] = [
            (_PERTURBATION_SETTINGS, self.perturbation == "none", "perturbation is none"),
            (_DETECTOR_SETTINGS, self.perturbation != "selective", f"perturbation is {self.perturbation}"),
            (("names",), self.detector != "rules", "the detector has no list of names"),
            (("dpsgd_delta",), self.dpsgd_epsilon == 0, "dpsgd_epsilon asks for no DP-SGD"),
        ]
        for names, holds, why in idle:
            found = next((name for name in names if holds and name in given), None)
            if found:
                raise NodeSettingError(f"{found} has no effect where {why}: change that, or leave {found} out")

    def tighten(self, run: FederatedConfig) -> FederatedConfig:
        """The run's settings with this node's paths, and the stricter of both wherever a setting protects its texts.

        Raises:
            ClientRefusal: if the run's detector is a model of its own, or it asks for more work than this node allows.
        """
        for name in _WORK_SETTINGS:
            if getattr(run, name) > getattr(self, name):
                raise ClientRefusal(f"this client takes {name} up to {getattr(self, name)}: lower it, or ask its owner")
        others = set(run.detector.split(" + ")) - {*_OWN_DETECTORS, *self.detector.split(" + ")}
        if others and "selective" in (run.perturbation, self.perturbation):
            raise ClientRefusal(
                "this client asks the detectors rules and presidio, and models that it names itself: leave others out of the run"
            )
        found: dict[str, Any] = {
            name: getattr(self, name) for name in ("train", "state", "text_column", "names", "labelled_spans")
        }
        # A node evaluates nothing, and all of its file is its own.
        found |= {"eval": "", "partition": "own"}
        found |= {"model": self.model, "threads": self.threads or min(run.threads, os.cpu_count() or 1)}
        found["device"] = self.device or run.device
        found["physical_batch_size"] = min(self.physical_batch_size, run.physical_batch_size)
        if self.perturbation != "none":
            found |= self._perturbation(run)
        if self.dpsgd_epsilon > 0:
            found["dpsgd_epsilon"] = min(self.dpsgd_epsilon, run.dpsgd_epsilon or math.inf)
            found["dpsgd_delta"] = min(self.dpsgd_delta, run.dpsgd_delta)
        return dataclasses.replace(run, **found)

    def _perturbation(self, run: FederatedConfig) -> dict[str, Any]:
        """The stricter of both in each setting of the perturbation; the node's own where the run asks for none."""
        found: dict[str, Any] = {
            "perturbation": max(self.perturbation, run.perturbation, key=PERTURBATIONS.index),
            "threshold": min(self.threshold, run.threshold),
            "detector": " + ".join(dict.fromkeys([self.detector, *run.detector.split(" + ")])),
        }
        own = {"mechanism": self.mechanism, "epsilon": self.epsilon, "budget": self.budget}
        if run.perturbation == "none":
            return found | own | {"detector": self.detector}
        if run.mechanism in _MECHANISMS:
            own["mechanism"] = max(self.mechanism, run.mechanism, key=_MECHANISMS.index)
        own["epsilon"] = min(self.epsilon, run.epsilon)
        own["budget"] = "text" if "text" in (self.budget, run.budget) else "token"
        return found | own


_TYPES = types_of(NodePolicy)
