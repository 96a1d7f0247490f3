"""What a run leaves to read: a line of figures a round, and the run's card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

import fastdp.accounting as accounting
from fastdp.accounting import Card
from fastdp.accounting.card import public_name
from fastdp.accounting.statements import FEDERATED, KEPT_BY_THE_SERVER, UNCOUNTED, federated_claims, federated_sentences
from fastdp.federated.config import FederatedConfig
from fastdp.ops.grid import DISTANCE

ROUNDS_FILE, CARD = "rounds.jsonl", "run_card"


def run_card(
    config: FederatedConfig, rows: Sequence[Mapping[str, Any]], clients: int, weights: Iterable[Tensor] = ()
) -> Card:
    """The card of a run of these rounds that began with ``clients`` clients: who was promised what, who has to be trusted.

    It keeps digests of ``weights``, and names no client. With central DP it does not state either how many took part, which
    the epsilon counts on nobody knowing.
    """
    stated = {setting.partition("=")[0] for setting in FEDERATED.split()}
    claims, flaws = federated_claims(config.as_dict())
    trusted, unprotected = federated_sentences(config.as_dict())
    return Card.of(
        claims[0] if claims else None,
        also=claims[1:],
        mechanism="federated fine-tuning",
        noise_source=accounting.noise_source(reproducible=False),
        weights=weights,
        # What one claim does not cover does not void another: it is open.
        flaws=() if claims else flaws,
        unprotected=[*(flaws if claims else ()), *unprotected],
        notes=[UNCOUNTED] if config.central else [],
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
                name: public_name(value) if name == "model" else value
                for name, value in config.as_dict().items()
                if name in stated
            },
        },
    )


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
