"""What every launcher needs: the device a launch goes to, and small tensors moved there without waiting."""

import contextlib

import torch


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's. Nothing to do for the interpreter's CPU tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def beside(small: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``small`` on the device of ``tensor``; the copy is queued, the host does not wait for the device."""
    return small.to(tensor.device, non_blocking=True)
