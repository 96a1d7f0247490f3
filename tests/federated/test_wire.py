"""Adapters as bytes: exact there and back, and small."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.federated.wire import pack_adapter, unpack_adapter


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from([torch.float32, torch.bfloat16])), max_size=5
    )
)
def test_there_and_back(shapes):
    state = {f"t{index}": torch.randn(shape).to(dtype) for index, (shape, dtype) in enumerate(shapes)}
    found = unpack_adapter(pack_adapter(state), state)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)


def test_bytes_of_a_message_are_the_adapters_and_five_per_cent():
    """All objects of Flower's message, of a bottleneck of 16 and LoRA of 4 in four layers of width 256."""
    pytest.importorskip("flwr", reason="flwr is the optional extra 'federated'")
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from fastdp.federated.messages import Order, update_record
    from fastdp.federated.site import FitResult

    name = "base_model.model.transformer.h.{}.mlp.c_proj.{}.default.weight"
    bottleneck = {name.format(i, f"bottleneck_{k}"): torch.randn(16, 256) for i in range(4) for k in ("down", "up")}
    lora = {name.format(i, f"lora_{k}{j}"): torch.randn(4, 512) for i in range(4) for k in "AB" for j in range(4)}
    for state in (bottleneck, lora):
        size = sum(tensor.nbytes for tensor in state.values())
        for record in (
            update_record(state, FitResult(10, 1.0, 2.0)),
            Order(pack_adapter(state), 1, "0" * 64).to_record(),
        ):
            sent = sum(len(part.deflate()) for part in get_all_nested_objects(record).values())
            assert size < sent <= 1.05 * size
