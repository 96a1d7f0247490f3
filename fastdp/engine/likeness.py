"""Whether a second backward pass captures what the first one did, from a few columns of every capture.

Norms come from the first pass and sums from the second. Under checkpointing each makes its factors anew, so a model that
keeps a count, draws from a generator of its own or reads a clock could give the sums factors that nothing has measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from fastdp.engine.errors import SelfCheckError
from fastdp.engine.layout import Layout
from fastdp.engine.uses import Factors, Sink

_COLUMNS = 8
#: How far an entry may move, relative to the largest of its row that is looked at: kernels may add up in another order
#: when their operands lie elsewhere in memory. A unit's norm then moves by as small a share.
_ROUNDING = 2.0**-14
#: The same of half precision on devices whose kernels add up in no fixed order.
_UNORDERED = 2.0**-6
_SECRET = random.SystemRandom()


class Likeness:
    """Keeps a band of columns of each capture of a first pass, at a secret place, and compares those of a second with it.

    Every row of every capture is looked at, so that no unit is left out; a band is a hundredth of what is captured.

    Args:
        names: of the trained parameters, by identity.
    """

    def __init__(self, names: Mapping[int, str]):
        self.names = names
        self.captures: list[str] = []
        self.places: list[int] = []
        self.bands: list[torch.Tensor] = []

    def differing(self, again: Likeness) -> torch.Tensor:
        """For each capture whether another pass had something else, bool, in the order of `captures`.

        Raises `SelfCheckError` if the other pass captured other parameters, or in other shapes.
        """
        shapes = [[(name, band.shape) for name, band in zip(x.captures, x.bands)] for x in (self, again)]
        if shapes[0] != shapes[1]:
            odd = next((a or b for a, b in zip(*shapes) if a != b), max(shapes, key=len)[min(map(len, shapes)) :][0])
            raise unlike(odd[0])
        apart = [_apart(a, b) for a, b in zip(self.bands, again.bands)]
        return torch.stack(apart) if apart else torch.zeros(0, dtype=torch.bool)


class Noting:
    """A sink that passes captures on to another, and keeps bands of them.

    Args:
        sink: receives every capture.
        likeness: what is kept; ``places`` that it holds already are taken, others drawn.
    """

    def __init__(self, sink: Sink, likeness: Likeness):
        self.sink, self.likeness = sink, likeness

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        """One use of a matrix."""
        self._keep(parameter, factors.left, factors.right)
        self.sink.matrix(parameter, factors, layout)

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        """The gradient of an expanded parameter."""
        self._keep(parameter, lanes)
        self.sink.vector(parameter, lanes, layout)

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        """A bias's gradient by token."""
        self._keep(parameter, gradient)
        self.sink.tokens(parameter, gradient, layout, laned)

    def _keep(self, parameter: torch.nn.Parameter, *captured: torch.Tensor) -> None:
        kept = self.likeness
        for tensor in captured:
            flat = tensor.detach().unsqueeze(1) if tensor.dim() < 2 else tensor.detach().flatten(1)
            if len(kept.places) == len(kept.bands):
                kept.places.append(_SECRET.randrange(max(1, flat.shape[1] - _COLUMNS + 1)))
            start = kept.places[len(kept.bands)]
            kept.captures.append(kept.names[id(parameter)])
            kept.bands.append(flat[:, start : start + _COLUMNS].clone())


def _apart(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    if not one.is_floating_point():
        return (one != two).any()
    ordered = one.device.type == "cpu" or one.dtype in (torch.float32, torch.float64)
    gaps = (one.float() - two.float()).abs().amax(1)
    sizes = one.float().abs().amax(1)
    # A row that was not finite when norms were taken has weight 0, by selection, whatever it is now.
    return (~(gaps <= sizes * (_ROUNDING if ordered else _UNORDERED)) & sizes.isfinite()).any()


def unlike(name: str) -> SelfCheckError:
    """The refusal of a parameter whose captures differ between two passes."""
    return SelfCheckError(
        f"{name}: the second backward pass over a batch did not find what the first one had, so that sums would hold what no "
        "norm was taken of: let nothing in a checkpointed piece depend on more than its inputs (a counter, a clock, a random "
        "generator of its own); nothing of this batch was released"
    )
