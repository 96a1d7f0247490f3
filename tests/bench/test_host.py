"""The host's own work in a step: how many functions of ours Python calls for one more layer, which no machine changes."""

import dataclasses
import sys
from collections.abc import Callable

import pytest
from fastdp.bench import simulate
from fastdp.bench.meter import GPUS, META, simulated

from tests.bench.test_simulate import small

pytest.importorskip("triton")


def calls(step: Callable[[], None]) -> int:
    """Calls of our own functions in a step, but for the meter's."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        name = frame.f_globals.get("__name__", "")
        count += event == "call" and name.startswith("fastdp.") and not name.startswith("fastdp.bench.")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("case", "most"),
    [
        pytest.param(small("llama", rank=4, tokens=16), 265, id="llama-lora"),
        pytest.param(small("llama", tokens=16), 215, id="llama-full", marks=pytest.mark.slow),
        pytest.param(small("bert", tokens=16), 355, id="bert-full"),
        pytest.param(small("gpt2", tokens=16), 357, id="gpt2-full", marks=pytest.mark.slow),
    ],
)
def test_a_layer_takes_few_calls(case, most):
    """By the difference of two depths, in the third step; with a 20th of room, for other versions of torch and transformers."""
    found = []
    for layers in (1, 2):
        with simulated(GPUS["h100"]):
            step = simulate.step_of(dataclasses.replace(case, layers=layers), META, private=True)
            step()
            step()
            found.append(calls(step))
    assert 0 < found[1] - found[0] <= most
