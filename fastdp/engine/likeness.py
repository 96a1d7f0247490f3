"""Whether a second backward pass captures what the first one did, from one token of every unit in every capture.

Norms come from the first pass and sums from the second. Under checkpointing each makes its factors anew, so a model that
keeps a count, draws from a generator of its own or reads a clock could give the sums factors that nothing has measured.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from fastdp.engine.errors import SelfCheckError
from fastdp.engine.factors import Factors
from fastdp.engine.layout import Layout
from fastdp.engine.uses import Sink

_COLUMNS = 256
#: How far an entry may move, relative to the largest of its row that is looked at: kernels may add up in another order
#: when their operands lie elsewhere in memory. A unit's norm then moves by as small a share.
_ROUNDING = 2.0**-14
#: The same of half precision on devices whose kernels add up in no fixed order.
_UNORDERED = 2.0**-6
#: Of each kind of band the parameters with their rows, one behind the other, and which rows differ, bool.
Compared = Sequence[tuple[Sequence[tuple[str, int]], torch.Tensor]]


class Likeness:
    """Keeps a token of each unit in each capture of a first pass, and compares those of a second with it.

    Which token (and which band of columns, of wide ones) is drawn in secret for each capture, so that what differs at a few
    tokens is found where the captures around it are other too.

    Args:
        names: of the trained parameters, by identity.
    """

    def __init__(self, names: Mapping[int, str]):
        self.names = names
        #: The parameters of captures, as they came, and of the bands that are kept of them.
        self.sequence: list[str] = []
        self.captures: list[str] = []
        self.places: list[tuple[int, int]] = []
        self.bands: list[torch.Tensor] = []
        self.draw = random.Random(random.SystemRandom().getrandbits(64))

    def compared(self, again: Likeness) -> Compared:
        """Which rows another pass had otherwise.

        Raises `SelfCheckError` if the other pass captured other parameters, or in other shapes.
        """
        shapes = [[(name, band.shape) for name, band in zip(x.captures, x.bands)] for x in (self, again)]
        if shapes[0] != shapes[1]:
            odd = next((a or b for a, b in zip(*shapes) if a != b), max(shapes, key=len)[min(map(len, shapes)) :][0])
            raise unlike(odd[0])
        alike: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, band in enumerate(self.bands):
            alike.setdefault((band.shape[1], band.dtype), []).append(index)
        found = []
        for indices in alike.values():
            one, two = (torch.cat([x.bands[index] for index in indices]) for x in (self, again))
            found.append(([(self.captures[i], self.bands[i].shape[0]) for i in indices], apart(one, two)))
        return found


class Noting:
    """A sink that passes captures on to another, and keeps some of each.

    Args:
        sink: receives every capture.
        likeness: what is kept; ``places`` that it holds already are taken, others drawn.
    """

    def __init__(self, sink: Sink, likeness: Likeness):
        self.sink, self.likeness = sink, likeness

    def matrix(self, parameter: torch.nn.Parameter, factors: Factors, layout: Layout) -> None:
        self._keep(layout, parameter, factors.left, factors.right)
        self.sink.matrix(parameter, factors, layout)

    def vector(self, parameter: torch.nn.Parameter, lanes: torch.Tensor, layout: Layout) -> None:
        self._keep(layout, parameter, lanes)
        self.sink.vector(parameter, lanes, layout)

    def tokens(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, layout: Layout, laned: bool) -> None:
        self._keep(layout, parameter, gradient)
        self.sink.tokens(parameter, gradient, layout, laned)

    def instances(self, parameter: torch.nn.Parameter, gradients: torch.Tensor, layout: Layout) -> None:
        self._keep(layout, parameter, gradients)
        self.sink.instances(parameter, gradients, layout)

    def _keep(self, layout: Layout, parameter: torch.nn.Parameter, *captured: torch.Tensor) -> None:
        kept, name = self.likeness, self.likeness.names[id(parameter)]
        kept.sequence.append(name)
        for tensor in captured:
            flat = tensor.unsqueeze(1) if tensor.dim() < 2 else tensor if tensor.dim() == 2 else tensor.flatten(1)
            tokens, columns = flat.shape
            step = max(1, tokens // layout.lanes)
            if len(kept.places) == len(kept.bands):
                kept.places.append((kept.draw.randrange(step), kept.draw.randrange(max(1, columns - _COLUMNS + 1))))
            row, column = kept.places[len(kept.bands)]
            down, across = flat.stride()
            # One view in the place of three: what this costs is the calls, which are many.
            size = (max(0, tokens - row + step - 1) // step, max(0, min(_COLUMNS, columns - column)))
            start = flat.storage_offset() + row * down + column * across if 0 not in size else 0
            kept.captures.append(name)
            kept.bands.append(flat.as_strided(size, (step * down, across), start).clone())


def apart(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Which rows ``[n]`` of two tensors ``[n, k]`` differ by more than rounding; bool."""
    if not one.is_floating_point():
        return (one != two).any(1)
    ordered = one.device.type == "cpu" or one.dtype in (torch.float32, torch.float64)
    gaps = (one.float() - two.float()).abs().amax(1)
    sizes = one.float().abs().amax(1)
    # A row that was not finite when norms were taken has weight 0, by selection, whatever it is now.
    return ~(gaps <= sizes * (_ROUNDING if ordered else _UNORDERED)) & sizes.isfinite()


def require_alike(compared: Compared) -> None:
    """Raise `SelfCheckError`, naming a parameter, if rows of its captures differ. On a GPU this waits for the device."""
    for named, differing in compared:
        if bool(differing.any()):
            row = int(differing.nonzero()[0])
            for name, rows in named:
                if row < rows:
                    raise unlike(name)
                row -= rows


def unlike(name: str) -> SelfCheckError:
    """The refusal of a parameter whose captures differ between two passes."""
    return SelfCheckError(
        f"{name}: the second backward pass over a batch did not find what the first one had, so that sums would hold what no "
        "norm was taken of: let nothing in a checkpointed piece depend on more than its inputs (a counter, a clock, a random "
        "generator of its own); nothing of this batch was released"
    )
