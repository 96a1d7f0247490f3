"""A ledger that is begun or continued: one run's card never speaks for another's mechanism, and a refusal leaves no trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdp
from fastdp.accounting import Ledger, LedgerError
from tests.cases import cases
from tests.engine.runs import PRIVATE, Classifier, examples, loader, start


def make(method: Any = None, data: Any = None, **options: Any) -> Any:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return start(model, data or loader(), optimizer, method=method, **{**PRIVATE, **options})


HALVES = {"first": ("first.*",), "second": ("second.*",)}


@cases(
    "own, other, named",
    [
        ({"method": fastdp.DPSGD(max_grad_norm=1.0)}, {"method": fastdp.DPSGD(max_grad_norm=2.0)}, "mechanism"),
        # One card speaks for all of its noise, and for the shapes of all of its steps.
        ({"noise_rounds": 12}, {"noise_rounds": 20}, "noise_rounds"),
        ({"noise_rounds": 20}, {"noise_rounds": 12}, "noise_rounds"),
        ({"isolation": "per_example"}, {}, "shapes"),
        # Settings that are tuples are recognised.
        (
            {"method": fastdp.DPFrost(partitions=HALVES, unfreezing_ratio=0.9, selection_noise_multiplier=2.0)},
            {},
            "mechanism",
        ),
    ],
)
def test_a_run_is_continued_with_its_own_settings_alone(
    own: dict[str, Any], other: dict[str, Any], named: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    make(**own, output_dir=folder).detach()
    with pytest.raises(ValueError, match=f"another {named}; resume with the same arguments"):
        make(**other, output_dir=folder, resume=True)
    # The refusal let the file go: the right arguments are taken in the same process.
    resumed = make(**own, output_dir=folder, resume=True)
    assert resumed.card()["noise_source"]["generator"] == f"ChaCha{own.get('noise_rounds', 20)}"
    resumed.detach()
    assert Ledger.read(folder / "ledger.jsonl").header["shapes"] == ("public" if "isolation" in own else "own")


def test_a_ledger_from_before_there_was_a_choice_has_20_rounds(tmp_path: Path) -> None:
    header = {"run": "earlier"}
    event = fastdp.accounting.dpsgd_model(1.0, 0.1, "poisson", 10)
    Ledger.create(tmp_path / "ledger.jsonl", header, event=event, budget_steps=3).close()
    opened = partial(Ledger.open_or_create, tmp_path / "ledger.jsonl", event=event, budget_steps=3, resume=True)
    with pytest.raises(ValueError, match="another noise_rounds"):
        opened(header | {"noise_rounds": 12})
    opened(header | {"noise_rounds": 20}).close()


def test_a_refusal_after_the_ledger_was_begun_takes_it_back(tmp_path: Path) -> None:
    class Measured(list):
        lengths = (1, 2)

    data = loader(Measured(examples()))
    with pytest.raises(ValueError, match="give one an example"):
        make(data=data, output_dir=tmp_path)
    assert not (tmp_path / "ledger.jsonl").exists()
    make(output_dir=tmp_path).detach()


def test_another_selection_is_refused_and_the_ledger_stays_usable(tmp_path: Path) -> None:
    def selecting(noise: float) -> Any:
        return fastdp.DPFrost(unfreezing_ratio=0.9, selection_noise_multiplier=noise)

    make(selecting(2.0), output_dir=tmp_path).detach()
    written = (tmp_path / "ledger.jsonl").read_text()
    with pytest.raises((ValueError, LedgerError), match="with the same arguments|begun with"):
        make(selecting(3.0), output_dir=tmp_path, resume=True)
    assert (tmp_path / "ledger.jsonl").read_text().startswith(written), "a refusal cut the history"
    make(selecting(2.0), output_dir=tmp_path, resume=True).detach()
