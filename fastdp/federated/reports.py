"""What a run leaves to read: a line of figures a round, a picture, and the run's card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import fastdp.accounting as accounting
import fastdp.files as files
from fastdp.accounting.card import Card, digest
from fastdp.accounting.serialisation import canonical
from fastdp.federated.config import FederatedConfig
from fastdp.methods.selective.card import GUARANTEES

ROUNDS, CARD = "rounds.jsonl", "run_card"


#: What a server of central DP holds and must not publish: the epsilon counts on nobody knowing who was sampled.
KEPT_BY_THE_SERVER = (
    f"{ROUNDS}, server.safetensors and the server's log hold who was sampled and refused, how many answered in each round, and "
    "losses that clients reported without noise: they must stay with the server"
)


class RunCard(Card):
    """The card of a run: who was promised what, and who has to be trusted for it."""

    @classmethod
    def of_run(cls, config: FederatedConfig, rows: Sequence[Mapping[str, Any]], clients: int) -> RunCard:
        """The card of the rounds in ``rows``, of a run that began with ``clients`` clients.

        It names no client. With central DP it does not state either how many took part, which the epsilon counts on nobody
        knowing.
        """
        promises, flaws = _promises(config)
        body = {
            "format": "fastdp.federated-run-card",
            "version": 1,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "promises": promises,
            "no_guarantee": flaws,
            "clients": clients,
            "rounds": len(rows),
            "void_rounds": sum(bool(row["void"]) for row in rows),
            "updates": None if config.central else _updates(rows),
            "perplexity": [row["perplexity"] for row in rows],
            "settings": config.as_dict(),
            "trusted": _trusted(config),
            "unprotected": _unprotected(config),
        }
        body = json.loads(canonical(body))
        return cls(body, digest=digest(body))

    def to_markdown(self) -> str:
        """The card for a reader."""
        lines = ["# Card of a federated run", ""]
        lines += [f"- **{promise}**" for promise in self["promises"]]
        lines += [f"- **No guarantee:** {flaw}" for flaw in self["no_guarantee"]]
        updates = self["updates"]
        taken = "not stated: who was sampled is secret"
        if updates is not None:
            taken = f"{updates['accepted']} accepted, {updates['refused']} refused, {updates['missing']} missing"
        figures = [f"{value:.2f}" for value in self["perplexity"] if value is not None]
        rows = [
            ("Rounds", f"{self['rounds']}, of which {self['void_rounds']} changed nothing"),
            ("Clients", f"{self['clients']} at the beginning"),
            ("Updates", taken),
            (
                "Perplexity",
                f"{figures[0]} after the first round, {figures[-1]} after the last" if figures else "not measured",
            ),
        ]
        lines += ["", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
        for heading, key in (("Trusted", "trusted"), ("Not protected", "unprotected")):
            lines += [f"## {heading}", "", *(f"- {entry}" for entry in self[key]), ""]
        settings = json.dumps(self["settings"], indent=2)
        return "\n".join([*lines, "## Settings", "", "```json", settings, "```", ""])


def _promises(config: FederatedConfig) -> tuple[list[str], list[str]]:
    promises, flaws = [], []
    if config.perturbation == "none":
        flaws.append("clients train on their texts as they are")
    elif config.mechanism == "paper":
        flaws.append("clients perturb by the paper's mechanism, for which no epsilon holds")
    else:
        what = "every token" if config.perturbation == "all" else "the private tokens that the detector finds"
        promises.append(
            f"Against the server and everyone else: {GUARANTEES[config.mechanism]}, epsilon {config.epsilon:g} a "
            f"{config.budget}, for {what}; drawn once in this run, whatever the number of its rounds"
        )
    if config.dpsgd_epsilon > 0:
        promises.append(
            f"Against the server and everyone else: each example of a client at epsilon {config.dpsgd_epsilon:g}, delta "
            f"{config.dpsgd_delta:g} (DP-SGD at the client, whose card certifies it)"
        )
    if config.central:
        promises.append("Against everyone but the server: each client as a whole, at the epsilon of card.json")
    return promises, flaws


def _updates(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {
        "accepted": sum(row["accepted"] for row in rows),
        "refused": sum(len(row["refused"]) for row in rows),
        "missing": sum(row["missing"] for row in rows),
    }


def _unprotected(config: FederatedConfig) -> list[str]:
    found = [
        "what every client's own card lists as not protected",
        "who took part, when, for how long, and with how many examples",
        "the choice of a round by held-out perplexity",
    ]
    if config.perturbation != "none":
        found.append(
            "further runs: where a client does not keep its draws (state), its tokens are drawn anew, at a second budget"
        )
    if config.dpsgd_epsilon == 0:
        found.append("training losses that clients report")
    if config.evaluation == "clients":
        found.append("perplexities of their own held-out texts that clients report without noise")
    if config.central:
        found.append(KEPT_BY_THE_SERVER)
    return found


def _trusted(config: FederatedConfig) -> list[str]:
    found = ["each client for its own perturbation and training: the server sees adapters, not how they were made"]
    if config.central:
        found.append(
            "the server, which sees every client's update before it adds noise, and keeps who was sampled secret"
        )
    return found


def central_card(
    config: FederatedConfig, ledger: accounting.Ledger, clients: int, model: Mapping[str, Any], reproducible: bool
) -> Card:
    """The certified card of central DP: clients are the units, rounds are the releases."""
    return Card.build(
        mechanism={"name": "central DP federated averaging", "client_clip": config.client_clip},
        unit="client",
        adjacency="add_remove",
        sampling="poisson",
        sample_rate=config.fraction,
        dataset_size=clients,
        noise_multiplier=config.client_noise_multiplier,
        event=ledger.event(),
        delta=config.client_delta,
        planned_steps=ledger.budget_steps,
        spent_steps=ledger.spent_steps,
        run_id=ledger.run_id,
        noise_source={
            "generator": "ChaCha20",
            "key": "unsafe_reproducible" if reproducible else "operating system",
            "secure_rounding": False,
        },
        model=model,
        unprotected=[
            "everything against the server itself, which sees each update before the noise",
            KEPT_BY_THE_SERVER,
        ],
    )


def write_rounds(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """All rounds so far, one JSON object a line."""
    files.write(output / ROUNDS, "".join(json.dumps(row) + "\n" for row in rows))


def perplexity_by_round(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A PNG of held-out perplexity over rounds; rounds without one are left out."""
    points = [(row["round"], row["perplexity"]) for row in rows if row["perplexity"] is not None]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    if points:
        axes.plot(*zip(*points), color="#1b3a57", marker="o", markersize=3, linewidth=1.8)
    axes.set(xlabel="round", ylabel="perplexity")
    axes.set_title("Held-out perplexity", fontsize=10, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
