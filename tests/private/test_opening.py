"""A ledger that is begun or continued: one run's card never speaks for another's mechanism, and a refusal leaves no trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastdp
from fastdp.accounting import Ledger, LedgerError
from tests.engine.runs import Classifier, examples, loader, start

PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3}


def make(method: Any = None, data: Any = None, **options: Any) -> Any:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return start(model, data or loader(), optimizer, method=method, **{**PRIVATE, **options})


def test_a_run_is_continued_by_its_own_mechanism_alone(tmp_path: Path) -> None:
    make(fastdp.DPSGD(max_grad_norm=1.0), output_dir=tmp_path).detach()
    with pytest.raises(ValueError, match="another mechanism; resume with the same arguments"):
        make(fastdp.DPSGD(max_grad_norm=2.0), output_dir=tmp_path, resume=True)
    # The refusal let the file go: the right arguments are taken in the same process.
    make(fastdp.DPSGD(max_grad_norm=1.0), output_dir=tmp_path, resume=True).detach()


def test_a_run_is_continued_with_its_own_rounds_alone(tmp_path: Path) -> None:
    """One card speaks for all of its noise: it names one generator."""
    for rounds, other in ((12, 20), (20, 12)):
        folder = tmp_path / str(rounds)
        make(output_dir=folder, noise_rounds=rounds).detach()
        with pytest.raises(ValueError, match="another noise_rounds; resume with the same arguments"):
            make(output_dir=folder, noise_rounds=other, resume=True)
        resumed = make(output_dir=folder, noise_rounds=rounds, resume=True)
        assert resumed.card()["noise_source"]["generator"] == f"ChaCha{rounds}"
        resumed.detach()


def test_a_run_is_continued_with_its_own_shapes_alone(tmp_path: Path) -> None:
    """One sentence of the card speaks for all of its steps, which public shapes and isolation make alike."""
    make(output_dir=tmp_path, isolation="per_example").detach()
    with pytest.raises(ValueError, match="another shapes; resume with the same arguments"):
        make(output_dir=tmp_path, resume=True)
    make(output_dir=tmp_path, resume=True, isolation="per_example").detach()
    assert Ledger.read(tmp_path / "ledger.jsonl").header["shapes"] == "public"


def test_a_ledger_from_before_there_was_a_choice_has_20_rounds(tmp_path: Path) -> None:
    header = {"run": "earlier"}
    event = fastdp.accounting.dpsgd_model(1.0, 0.1, "poisson", 10)
    Ledger.create(tmp_path / "ledger.jsonl", header, event=event, budget_steps=3).close()
    opened = partial(Ledger.open_or_create, tmp_path / "ledger.jsonl", event=event, budget_steps=3, resume=True)
    with pytest.raises(ValueError, match="another noise_rounds"):
        opened(header | {"noise_rounds": 12})
    opened(header | {"noise_rounds": 20}).close()


def test_methods_whose_settings_are_tuples_are_recognised(tmp_path: Path) -> None:
    halves = {"first": ("first.*",), "second": ("second.*",)}
    method = fastdp.DPFrost(partitions=halves, unfreezing_ratio=0.9, selection_noise_multiplier=2.0)
    make(method, output_dir=tmp_path).detach()
    make(method, output_dir=tmp_path, resume=True).detach()


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
