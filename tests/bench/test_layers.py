"""The small models of the step benchmark: each by the rules, none on the one-example route."""

import warnings

import torch
from fastdp.bench.layers import KINDS
from torch.utils.data import DataLoader

import fastdp
from tests.cases import cases


@cases("name", KINDS)
def test_every_kind_is_trained_by_rules(name: str) -> None:
    kind = KINDS[name]
    torch.manual_seed(0)
    model = kind.build(20, 64, 1).train()
    shape = (3, *[6] * kind.dimensions)
    rows = [torch.randn(shape) if kind.dimensions else torch.randint(0, 20, (5,)) for _ in range(8)]
    data = [{"x": row, "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)]
    private = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=8),  # type: ignore[arg-type]
        noise_multiplier=1.0,
        target_delta=1e-3,
        epochs=1,
        sampling="shuffled",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for batch in private.data_loader:
            private.model(**batch).loss.backward()
            private.optimizer.step()
            break
    assert private.route == "uses"
