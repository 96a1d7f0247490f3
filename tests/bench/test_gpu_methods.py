"""One step of each method against the processor's, run on a processor: equal results hold, others do not."""

from __future__ import annotations

import torch
from fastdp.bench import gpu_methods


def test_every_method_repeats_itself_and_does_something():
    found = dict(gpu_methods.methods("cpu"))
    draws = found.pop("method selective")
    assert found.keys() == {f"method {name}" for name in gpu_methods.METHODS} - {"method selective"}
    assert all(error == 0 and bound > 0 for error, bound in found.values())
    # A processor's draws are not those of the definition, by which other devices go.
    assert draws[0] > draws[1]


def test_a_token_or_a_weight_that_differs_is_found(monkeypatch):
    def ids(device, seen=[]):  # noqa: B006
        seen.append(device)
        return torch.arange(256).add(len(seen) == 2).double()

    monkeypatch.setattr(gpu_methods, "METHODS", {"one": ids})
    ((_, (error, bound)),) = gpu_methods.methods("cpu")
    assert error > bound
