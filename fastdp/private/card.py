"""The card of a run: what its plan, ledger, engine and method say of what was bought."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import cast

import fastdp.accounting as accounting
from fastdp.accounting.card import among_units_in_words
from fastdp.accounting.statements import TRUST
from fastdp.distributed.pieces import full_tensor
from fastdp.ops.grid import DISTANCE
from fastdp.private.loader import PrivateLoader
from fastdp.private.method import Installed
from fastdp.private.provenance import Provenance
from fastdp.private.shapes import shape_statement
from fastdp.private.stages import Stages
from fastdp.private.steps import UNCHECKED
from fastdp.verify import Checks

_VERIFIED = ", and was verified on the first batch, on unusual ones and by a public schedule"
_UNCHECKED_ROWS = (
    "no example reached another in the model or in the loop: nothing looked (self_check=False), and where one did the "
    "figure does not hold"
)
#: Under this name the ledger keeps that a logical batch was handed out, and not released.
DISCARDED = "discarded batches"
_DISCARDED_BATCHES = (
    "logical batches that were begun and not released were discarded for reasons that no record has a part in, like a shortage "
    "of memory: leaving out a batch because of its loss tells of all of it"
)
_PASSES = "how many backward passes a checkpointed microbatch took: the choice depends on the lengths of its examples"


def training_card(
    stages: Stages,
    data_loader: PrivateLoader,
    provenance: Provenance,
    *,
    installed: Installed | None,
    observed: Iterable[str],
    assumed: Iterable[str],
    longest: int | None,
) -> accounting.Card:
    """Build the card of a training run as it is now.

    Args:
        installed: what holds the trained weights, if not the engine.
        observed: kinds of observers that looked on.
        assumed: what the run takes for granted besides.
        longest: the most tokens that settings let a unit have.
    """
    engine, release, ledger, plan = stages.engine, stages.release, stages.ledger, stages.plan
    seen = ", ".join(sorted(observed))
    unchecked = ledger.noted(UNCHECKED) is not None
    moved = engine.parameters if installed is None else installed.trained
    noised = sum(p.numel() for p in engine.parameters.values())
    distance = DISTANCE * noised * sum(ledger.spent(kind) for kind in ledger.kinds)
    return accounting.Card.build(
        mechanism=stages.method.describe(),
        unit=plan.unit,
        adjacency=plan.adjacency,
        sampling=plan.sampling,
        sample_rate=plan.sample_rate,
        dataset_size=plan.units,
        noise_multiplier=plan.sigma,
        event=ledger.event(),
        delta=plan.delta,
        # A run that was extended has no target any more.
        target_epsilon=plan.target_epsilon if ledger.budget_steps <= plan.steps else None,
        planned_steps=ledger.budget_steps,
        spent_steps=ledger.spent_steps,
        run_id=ledger.run_id,
        ledger_head=ledger.head,
        weights=map(full_tensor, moved.values()),
        noise_source=accounting.noise_source(
            release.stream.reproducible, release.secure_rounding, release.stream.rounds
        ),
        model={
            "name": accounting.model_name(stages.model),
            "trained_parameters": sum(p.numel() for p in moved.values()),
            "processes": stages.ranks.size,
            **({"backward_passes": engine.backward_passes} if engine.checkpointed else {}),
            "fingerprint": ledger.header["fingerprint"],
        },
        flaws=stages.method.flaws(),
        notes=stages.method.notes(plan, ledger),
        assumptions=[
            f"{TRUST}{'' if unchecked or engine.isolated else _VERIFIED} (SECURITY.md)",
            *([_UNCHECKED_ROWS] if unchecked else []),
            *([_DISCARDED_BATCHES] if ledger.noted(DISCARDED) is not None else []),
            *cast(Checks, engine.checks).sentences(),
            *provenance.sentences(),
            *assumed,
        ],
        unprotected=[
            *([f"what looked on at the run from inside, before its noise: {seen}"] if seen else []),
            *([_PASSES] if engine.checkpointed else []),
        ],
        remaining=[
            *([accounting.rounded_to_grid(distance)] if release.secure_rounding else []),
            *(_rounding_among_units(stages, data_loader, longest) if engine.accumulator.policy.bounds else ()),
        ],
    )


def _rounding_among_units(stages: Stages, data_loader: PrivateLoader, longest: int | None) -> Iterator[str]:
    yield among_units_in_words(math.ceil(stages.release.expected_batch_size), longest)
    on_gpu = any(p.device.type != "cpu" for p in stages.engine.parameters.values())
    yield shape_statement(data_loader.has_public_shapes, on_gpu=on_gpu)
