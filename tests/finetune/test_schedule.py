"""The learning rate of every step follows the schedule that was asked for, also after a resume."""

import json
import math
from dataclasses import replace

import pytest

from fastdp.finetune import finetune
from tests.finetune.runs import stop_after

#: Learning rates over the peak, of updates counted from 0 to T.
FORMS = {
    "linear": lambda step, total: (total - step) / total,
    "cosine": lambda step, total: math.cos(math.pi * step / total / 2) ** 2,
}


def rates(folder):
    """The learning rate after each update, by its number."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["learning_rate"] for row in rows}


def expected(schedule, warmup, steps, total, peak):
    """What a schedule says, written out: a rise over the first steps, times the form."""
    rise = [min(1.0, (step + 1) / (warmup * total)) if warmup else 1.0 for step in range(total + 1)]
    return {step: pytest.approx(peak * rise[step] * FORMS[schedule](step, total), abs=1e-12) for step in steps}


@pytest.mark.parametrize(("schedule", "warmup"), [("linear", 0.5), ("cosine", 0.0)])
def test_a_run_follows_its_schedule_and_so_does_one_that_was_stopped(config, tmp_path, schedule, warmup):
    config = replace(config, epochs=2, schedule=schedule, warmup=warmup, eval=None, learning_rate=2e-3)
    total = 6
    stop_after(4, config)
    before = rates(tmp_path / "run")
    assert before == expected(schedule, warmup, range(1, 5), total, 2e-3)
    result = finetune(config, resume=True)
    after = rates(tmp_path / "run")
    # The checkpoint is of two updates: two more were lost with the process, and those after it are new.
    assert max(after) == result.steps > 2
    assert after == expected(schedule, warmup, range(1, result.steps + 1), total, 2e-3)
