"""What a device says to the host later: asked for at once, and read when it has long arrived, so that the host need not wait."""

from __future__ import annotations

import torch


class Sent:
    """Values on their way from a device to the host.

    Args:
        values: on any device. From a GPU they are copied, in its own order, to memory that it writes by itself.

    Attributes:
        there: whether to read them makes the host wait for nothing.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._arrival = values, None
        self.there = not values.is_cuda
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(values.device))

    def read(self) -> torch.Tensor:
        """The values, on the processor; waits for them if they have not arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values.cpu()
