"""The cheapest exact route for a use."""
import torch


def plan(m: int, n: int, length: int, units: int, *, one_hot: bool = False, dtype: torch.dtype = torch.float32, device: object = None, keeps_factors: bool = True) -> str:
    """Route."""
    if one_hot:
        return "gram"
    if units * m * n <= units * length * (m + n):
        return "instantiate"
    return "gram"
