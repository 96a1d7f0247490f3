"""Masks without padding, in every form that stock models use."""

import pytest
import torch

from fastdp.methods.ewft import mask as masks


def test_forms():
    assert masks.full_mask(None, causal=True) is None
    assert masks.full_mask(torch.tensor([[1, 1, 0]]), causal=True).tolist() == [[1, 1, 1]]
    padded = (
        torch.ones(2, 1, 3, 3, dtype=torch.bool).tril() & torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()[:, None, None]
    )
    assert masks.full_mask(padded, causal=False) is None
    assert masks.full_mask(padded, causal=True)[0, 0].tolist() == torch.ones(3, 3).tril().bool().tolist()
    additive = torch.zeros(2, 1, 3, 3).masked_fill(~padded, torch.finfo(torch.float32).min)
    rewritten = masks.full_mask(additive, causal=True)
    assert ((rewritten == 0) == torch.ones(3, 3).tril().bool()).all()
    assert rewritten.dtype == additive.dtype
    with pytest.raises(ValueError, match="attn_implementation"):
        masks.full_mask(object(), causal=True)


class _Block(torch.nn.Module):
    def forward(self, hidden_states, past=None, attention_mask=None):
        return attention_mask


@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_by_position_and_by_name(by_name):
    block, mask = _Block(), torch.zeros(2, 5)
    args, kwargs = ((1,), {"attention_mask": mask}) if by_name else ((1, None, mask), {})
    assert masks.argument(block, args, kwargs) is mask
    args, kwargs = masks.hide_padding(block, args, kwargs, causal=False)
    assert (block(*args, **kwargs) == 1).all()
    assert masks.argument(block, (1,), {}) is None
    assert masks.hide_padding(block, (1,), {}, causal=False) == ((1,), {})
