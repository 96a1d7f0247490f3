"""A run that is kept and loaded goes on as if it had not stopped."""

import pytest
import torch

from fastdp.split.run import RUN_FILE, Run

SETTINGS = {"learning_rate": 0.1, "weight_decay": 0.01, "seed": 4, "dtype": "float32"}


def template():
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(3, 2, generator=generator), "unused": torch.randn(2, generator=generator)}


def step(run, number):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
    run.take_step(x @ run.parameters["a"], torch.ones(4, 2) * number, f"digest {number}")


def test_a_loaded_run_goes_on_bit_for_bit(tmp_path):
    whole, broken = Run(template(), SETTINGS), Run(template(), SETTINGS)
    for number in range(3):
        step(whole, number)
        step(broken, number)
    broken.save(tmp_path)
    loaded = Run.load(tmp_path, template())
    assert (loaded.step, loaded.digest, loaded.settings) == (3, "digest 2", SETTINGS)
    for number in range(3, 6):
        step(whole, number)
        step(loaded, number)
    for name, value in whole.parameters.items():
        assert torch.equal(value, loaded.parameters[name])
    assert not torch.equal(whole.parameters["a"], template()["a"])


def test_refusals(tmp_path):
    assert Run.load(tmp_path, template()) is None
    Run(template(), SETTINGS).save(tmp_path)
    with pytest.raises(ValueError, match="another model or adapter"):
        Run.load(tmp_path, {"a": torch.zeros(3, 3)})
    (tmp_path / RUN_FILE).write_bytes(b"garbage")
    with pytest.raises(ValueError, match="no run that can be taken up"):
        Run.load(tmp_path, template())
