"""The planner's constants, measured."""

import time

from fastdp.bench.planner import fit


def test_fit_measures_every_constant_quickly():
    start = time.process_time()
    constants = fit("cpu")
    assert time.process_time() - start < 20  # seconds of processor time; about one on an idle machine
    assert "cpu" in constants.device
    for rate in (constants.gram_flops, constants.direct_flops, constants.product_flops, constants.bandwidth):
        assert 1e7 < rate < 1e15
    assert 0 < constants.call_seconds < 1
