"""A model or an optimizer is in one private run at a time, which the model alone can end."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import fastdp
from tests.engine.runs import PRIVATE, Classifier, loader
from tests.loops import trained


def test_a_cell_that_is_run_twice() -> None:
    """The second run takes what the first one returned; nobody holds that one."""
    model: Any = Classifier()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    data: Any = loader()
    for again in range(2):
        if again:
            gc.collect()
            with pytest.raises(ValueError, match=r"private already: call fastdp\.detach\(model\)"):
                fastdp.make_private(model, optimizer, data, epochs=1, **PRIVATE)
            fastdp.detach(model)
            assert "forward" not in model.__dict__
        model, optimizer, data = private = fastdp.make_private(model, optimizer, data, epochs=1, **PRIVATE)
        for _ in trained(private):
            pass
        del private
    # A wrapper of the model serves as well, and the run may be held by nobody else.
    optimizer = data = None
    gc.collect()
    fastdp.detach(torch.nn.parallel.DataParallel(model))
    assert "forward" not in model.__dict__
    with pytest.raises(ValueError, match="in no private run"):
        fastdp.detach(model)
