"""Partitions chosen by chance."""

from fastdp.methods.frost import DPFrost
from tests.methods.frost.test_method import start, trained


def test_what_reads_no_private_data_costs_nothing() -> None:
    private = start(method=DPFrost(unfreezing_ratio=0.5, choose_by="random"), target_epsilon=3.0, target_delta=1e-3)
    assert list(private.ledger.kinds) == ["step"]
    next(iter(private.data_loader))
    assert private.epsilon() == 0
    assert "reads no private data" in private.card()["notes"][0]


def test_random_partitions_depend_on_the_seed_alone() -> None:
    chosen = []
    for seed in (0, 0, 1, 2, 3):
        private = start(method=DPFrost(unfreezing_ratio=0.5, choose_by="random", seed=seed))
        next(iter(private.data_loader))
        chosen.append(trained(private))
    assert chosen[0] == chosen[1]
    assert len({frozenset(c) for c in chosen}) > 1
