"""Records of which some come a second time."""

import pytest
import torch

from fastdp.methods.ewft.records import Records
from tests.cases import cases


@cases("ids", [[1], [1, 2], [2, 3, 0]])
def test_one_record_of_a_batch_that_was_released_in_this_epoch_is_enough(ids):
    records = Records(4)
    records.count(2, torch.tensor([0, 1]), epoch=1)
    with pytest.raises(RuntimeError, match="a second time"):
        records.count(len(ids), torch.tensor(ids), epoch=1)
    records.count(2, torch.tensor([2, 3]), epoch=1)
    assert bool(records.seen.all())


def test_a_release_is_drawn_for_the_new_records_of_a_batch_alone():
    records, drawn = Records(4), []

    def draw(code):
        drawn.append(code.clone())
        return code + 0.5

    codes = torch.arange(8.0).view(4, 2)
    records.reused(codes[:2], torch.tensor([0, 1]), draw)
    found = records.reused(9 + codes[1:], torch.tensor([1, 2, 3]), draw)
    assert torch.equal(drawn[1], 9 + codes[2:])
    assert torch.equal(found, torch.cat([codes[1:2], 9 + codes[2:]]) + 0.5)
