"""What the card of a run says of how it was checked."""

from __future__ import annotations

from pathlib import Path

import fastdp
from tests.engine.runs import logical_step, start


def test_a_run_without_checks_says_so_on_its_card_for_ever(tmp_path: Path) -> None:
    def assumed(private: fastdp.Private) -> list[bool]:
        return ["self_check=False" in line for line in private.card()["assumptions"]]

    options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 2, "output_dir": tmp_path}
    unchecked = start(self_check=False, **options)
    assert not any(assumed(unchecked))
    logical_step(unchecked)
    assert sum(assumed(unchecked)) == 1
    assert "was verified" not in " ".join(unchecked.card()["assumptions"])
    unchecked.ledger.close()
    unchecked.detach()
    resumed = start(resume=True, **options)
    logical_step(resumed)
    assert sum(assumed(resumed)) == 1
    assert fastdp.accounting.verify(resumed.card())
    checked = start(noise_multiplier=1.0, target_delta=1e-3)
    logical_step(checked)
    assert not any(assumed(checked))
