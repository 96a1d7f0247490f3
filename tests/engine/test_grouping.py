"""LoRA's small matrices in groups: the same sums however many wait for each other, and no more held than allowed."""

from __future__ import annotations

import pytest
import torch

from fastdp import ops
from fastdp.engine.clip import norms as norm_sinks
from fastdp.engine.routing import Routing
from tests.engine.models import batch, build
from tests.engine.reference import Recording, engine_for, ticket

EVERYTHING = 1 << 40


def step(
    name: str, may_hold: int, launches: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, dict, list[list[int]]]:
    """Norms, sums, and the bytes of the factors in each group of the step itself."""
    groups: list[list[int]] = []

    def counted(lefts, rights, offsets):
        groups.append([left.nbytes + right.nbytes for left, right in zip(lefts, rights)])
        return ops.per_unit_group(lefts, rights, offsets)

    seen = type("Ops", (), {**vars(ops), "per_unit_group": staticmethod(counted)})
    monkeypatch.setattr(norm_sinks, "ops", seen)
    monkeypatch.setattr(norm_sinks, "may_hold", lambda device: may_hold)
    monkeypatch.setattr(norm_sinks, "launches", lambda device: launches)
    # So short are the tests' texts that other routes are cheaper.
    monkeypatch.setattr(norm_sinks, "plan_route", lambda *sizes, **use: "instantiate")
    engine, tickets = engine_for(build(name, "lora"), 0.5, verify=Routing)
    tickets.append(ticket(4))
    engine.model(**batch(name)).loss.backward()
    assert engine.route == "uses", engine.reason
    return Recording.seen[-1], engine.accumulator.sums, groups


@pytest.mark.parametrize("launches", [False, True], ids=["processor", "GPU"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_grouping_changes_no_sum(name: str, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, sums, alone = step(name, 0, launches, monkeypatch)
    matrices = len(sums)
    assert [len(group) for group in alone] == [1] * matrices
    _, _, together = step(name, EVERYTHING, launches, monkeypatch)
    assert [len(group) for group in together] == [matrices]
    limit = sum(together[0]) // 3
    for may_hold in (EVERYTHING, limit):
        again, grouped, groups = step(name, may_hold, launches, monkeypatch)
        assert torch.equal(again, norms)
        # What waits is a GPU's, whose bound takes it as it is added; a processor's is the same whether or not it is kept.
        for n, total in sums.items():
            torch.testing.assert_close(grouped[n], total, rtol=1e-5, atol=1e-7)
        # The use that passes the limit is multiplied at once, together with those that waited.
        assert all(sum(group[:-1]) <= may_hold for group in groups)
        assert sum(map(len, groups)) == matrices
    assert 1 < len(groups) < matrices
