"""What a run leaves to read: a line of figures a round, and the run's card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

import fastdp.accounting as accounting
from fastdp.accounting import Card
from fastdp.accounting.card import public_name
from fastdp.federated.config import FederatedConfig
from fastdp.methods.selective.card import token_claim
from fastdp.ops.grid import DISTANCE

ROUNDS_FILE, CARD = "rounds.jsonl", "run_card"
_PATHS = ("model", "train", "eval", "output", "state", "names", "labelled_spans")


#: What a server of central DP holds and must not publish: the epsilon counts on nobody knowing who was sampled.
KEPT_BY_THE_SERVER = (
    f"{ROUNDS_FILE}, server.safetensors and the server's log hold who was sampled and refused, how many answered in each round, "
    "and losses that clients reported without noise: they must stay with the server"
)


def run_card(
    config: FederatedConfig, rows: Sequence[Mapping[str, Any]], clients: int, weights: Iterable[Tensor] = ()
) -> Card:
    """The card of a run of these rounds that began with ``clients`` clients: who was promised what, who has to be trusted.

    It keeps digests of ``weights``, and names no client. With central DP it does not state either how many took part, which
    the epsilon counts on nobody knowing.
    """
    claims, flaws = _claims(config)
    trusted = ["each client for its own perturbation and training: the server sees adapters, not how they were made"]
    if config.central:
        trusted.append(
            "the server, which sees every client's update before it adds noise, and keeps who was sampled secret"
        )
    return Card.of(
        claims[0] if claims else None,
        also=claims[1:],
        mechanism="federated fine-tuning",
        noise_source=accounting.noise_source(reproducible=False),
        weights=weights,
        # What one claim does not cover does not void another: it is open.
        flaws=() if claims else flaws,
        unprotected=[*(flaws if claims else ()), *_unprotected(config)],
        notes=["how many updates came is not stated: who was sampled is secret"] if config.central else [],
        facts={
            "clients": clients,
            "rounds": len(rows),
            "void_rounds": sum(bool(row["void"]) for row in rows),
            "updates": None
            if config.central
            else {
                "accepted": sum(row["accepted"] for row in rows),
                "refused": sum(len(row["refused"]) for row in rows),
                "missing": sum(row["missing"] for row in rows),
            },
            "perplexity": [row["perplexity"] for row in rows],
            "trusted": trusted,
            # Of a path its last part, which says nothing of a machine.
            "settings": {
                name: public_name(value) if name in _PATHS and value else value
                for name, value in config.as_dict().items()
            },
        },
    )


def _claims(config: FederatedConfig) -> tuple[list[accounting.Claim], list[str]]:
    """What is claimed, and what is open to the server and everyone else."""
    claims: list[accounting.Claim] = []
    flaws = []
    if config.perturbation == "none":
        flaws.append("clients train on their texts as they are")
    elif config.mechanism == "paper":
        flaws.append("clients perturb by the paper's mechanism, for which no epsilon holds")
    else:
        claims.append(token_claim(config.budget, config.epsilon, None))
    if config.dpsgd_epsilon > 0:
        promise = (
            f"against the server and everyone else, epsilon {config.dpsgd_epsilon:g} at delta {config.dpsgd_delta:g} for each "
            "example of a client (DP-SGD at the client)"
        )
        claims.append(accounting.ExternalClaim("example of a client", promise, "each client's own card"))
    if config.central:
        promise = "against everyone but the server, each client as a whole"
        claims.append(accounting.ExternalClaim("client", promise, "card.json"))
    return claims, flaws


def _unprotected(config: FederatedConfig) -> list[str]:
    found = [
        "what every client's own card lists as not protected",
        "who took part, when, for how long, and with how many examples",
        "the choice of a round by held-out perplexity",
    ]
    if config.perturbation != "none":
        found.append(
            "further runs: tokens are drawn once in this run, whatever the number of its rounds, but where a client does not "
            "keep its draws (state), they are drawn anew, at a second budget"
        )
    if config.dpsgd_epsilon == 0:
        found.append("training losses that clients report")
    if config.central:
        found.append(KEPT_BY_THE_SERVER)
    return found


def central_card(config: FederatedConfig, ledger: accounting.Ledger, clients: int, weights: Sequence[Tensor]) -> Card:
    """The certified card of central DP: clients are the units, rounds are the releases."""
    parameters = sum(each.numel() for each in weights)
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
        noise_source=accounting.noise_source(reproducible=False, secure_rounding=True),
        ledger_head=ledger.head,
        model={"name": public_name(config.model), "trained_parameters": parameters},
        weights=weights,
        remaining=[
            accounting.rounded_to_grid(DISTANCE * parameters * ledger.spent_steps),
            f"the sum of {clients} updates is rounded to float32 before its noise, which may move it by "
            f"{clients * 2.0**-23:.1e} of the bound",
        ],
        unprotected=[
            "everything against the server itself, which sees each update before the noise",
            KEPT_BY_THE_SERVER,
        ],
    )
