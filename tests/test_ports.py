"""The ports that docs/from-opacus.md shows change few lines, and run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from fastdp.quickstart import MODEL
from fastdp.quickstart.corpus import private_records
from tests.test_snippets import world

PAGE = Path(__file__).parents[1] / "docs" / "from-opacus.md"
PORTS = re.findall(r"```diff\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def texts() -> dict[str, Any]:
    """What a script of trl has at hand."""
    datasets = pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    rows = datasets.Dataset.from_dict({"text": private_records(64, seed=0)})
    return {"model": GPT2LMHeadModel.from_pretrained(MODEL, dtype=torch.float32), "tokenizer": tokenizer, "texts": rows}


def ported(number: int) -> str:
    """The program after a port, which changes at most nine lines."""
    lines = PORTS[number].splitlines()
    assert {line[:1] for line in lines} <= {" ", "+", "-", ""}
    assert 0 < sum(line[:1] in ("+", "-") and len(line) > 1 for line in lines) <= 9
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != left_out) for left_out in "+-")
    assert "fastdp" not in before
    compile(before, "before", "exec")
    return after


def test_a_loop_a_trainer_and_trl_are_ported() -> None:
    assert [next(word for word in ("for epoch", "DPTrainer", "DPSFTTrainer") if word in port) for port in PORTS] == [
        "for epoch",
        "DPTrainer",
        "DPSFTTrainer",
    ]
    assert all(map(ported, range(len(PORTS))))


#: What trl's trainers do is in tests/integrations/test_trl.py.
@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_port_changes_at_most_nine_lines_and_trains(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = ported(number)
    for library in ("trl", "accelerate"):
        if library in after or "Trainer" in after:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names = {**world("docs/loops.md"), **(texts() if "trl" in after else {})}
    exec(compile(after, f"port {number + 1}", "exec"), names)
    private = names["private"] if "private" in names else names["trainer"].private
    assert private.steps_done == private.total_steps > 0
    assert (tmp_path / "out").exists()
