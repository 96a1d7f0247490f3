"""Lightning's Trainer, automatic and manual: every micro-batch is trained on, and every release is the same."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is in the optional extra 'lightning'")

import torch

import fastdp

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_loop.py"


@pytest.mark.parametrize("manual", [False, True])
def test_the_example_spends_its_budget(
    manual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["loop", "--rows", "512", "--epochs", "2", "--output", str(tmp_path)] + ["--manual"] * manual
    )
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "after 8 of 8 releases" in capsys.readouterr().out
    assert fastdp.accounting.verify(tmp_path / "card.json", ledger=tmp_path / "ledger.jsonl").guarantee
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["privacy"]["steps_done"] == 8
    # The schedule advanced once a release, however many micro-batches there were.
    assert saved["lr_schedulers"][0]["last_epoch"] == 8
