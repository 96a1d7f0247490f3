"""Numbers sent to a device stay there for as long as something recorded reads them."""

import torch

from fastdp.ops.placed import CONSTANTS, keep_for_graph


def test_numbers_sent_before_are_held_by_what_is_recorded() -> None:
    before = CONSTANTS[(3.0, 7.0), torch.float64, torch.device("cpu")]
    with keep_for_graph() as tables:
        again = CONSTANTS[(3.0, 7.0), torch.float64, torch.device("cpu")]
    assert again is before
    assert any(table is before for table in tables)
