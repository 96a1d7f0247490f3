"""Norms of many uses by Gram matrices in one launch, kept until it is known whether rounding leaves them good enough."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import Errors, Norms, stacked
from fastdp.engine.factors import Factors
from fastdp.engine.head import REMEASURED
from fastdp.engine.layout import Layout
from fastdp.engine.policy import Policy
from fastdp.engine.sums import Route
from fastdp.ops.matrices import Matrices
from fastdp.ops.placed import sent


class Constants(NamedTuple):
    """Of one use: the errors of its norms by Gram matrices and by the direct route."""

    gram: Errors
    direct: Errors


class Found(NamedTuple):
    """One use of a parameter, the route to its norms, and their errors."""

    name: str
    use: Factors
    route: Route
    errors: Constants


class Batch(NamedTuple):
    """Factors of matrices without a mask over the same tokens, each the only use of its parameter, which `swap`s them."""

    names: tuple[str, ...]
    lefts: Matrices
    rights: Matrices
    swap: bool
    offsets: torch.Tensor
    errors: Sequence[Constants]

    def taken(self, order: tuple[int, ...]) -> Batch:
        """Those with these numbers."""
        if order == tuple(range(len(self.names))):
            return self
        return self._replace(
            names=tuple([self.names[at] for at in order]),
            lefts=self.lefts.taken(order),
            rights=self.rights.taken(order),
            errors=[self.errors[at] for at in order],
        )


class _Known(NamedTuple):
    """Norms by Gram matrices of uses over the same tokens, ``[uses, units]``, until it is known whether they are good enough."""

    names: Sequence[str]
    lefts: Sequence[torch.Tensor]
    rights: Sequence[torch.Tensor]
    offsets: torch.Tensor
    errors: Sequence[Constants]
    squares: torch.Tensor
    products: torch.Tensor
    #: What columns of both factors of each are multiplied by, if they are.
    scales: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


class Grams:
    """What one backward pass finds by Gram matrices, on its way into the ``norms`` of all groups."""

    def __init__(self, norms: Norms, policy: Policy, layout: Layout):
        self.norms, self.policy, self.layout = norms, policy, layout
        self._known: list[_Known] = []

    def add(self, found: Sequence[Found]) -> None:
        """Find the norms of uses that read the same input: its Gram matrix serves them all."""
        lefts, right = [one.use.left for one in found], found[0].use.right
        scales = [one.use.scales for one in found if one.use.scales]
        offsets = found[0].use.offsets(self.layout)
        norms = ops.gram_norms(lefts, [right], [len(lefts)], offsets, list(itertools.chain(*scales)))
        self.add_known(found, *norms)

    def add_known(self, found: Sequence[Found], squares: torch.Tensor, products: torch.Tensor) -> None:
        """Take norms ``[uses, units]`` of uses over the same tokens that are as good as those of Gram matrices."""
        names, uses, _, errors = zip(*found)
        lefts, rights = [use.left for use in uses], [use.right for use in uses]
        scales = [use.scales for use in uses if use.scales]
        self._known.append(
            _Known(names, lefts, rights, uses[0].offsets(self.layout), errors, squares, products, scales)
        )

    def add_batch(self, batch: Batch) -> None:
        """Find all norms of a batch by Gram matrices in one launch: each input's once for the uses that follow each other."""
        counts = batch.rights.counts
        firsts = (0, *itertools.accumulate(counts[:-1]))
        norms = ops.gram_norms(batch.lefts, batch.rights.taken(firsts), counts, batch.offsets)
        self._known.append(_Known(batch.names, batch.lefts, batch.rights, batch.offsets, batch.errors, *norms))

    def judge(self) -> None:
        """Take the norms found by Gram matrices, and find those of the units anew for which they are not good enough.

        A unit's group decides, over all that is known of it, so that a matrix whose gradient vanishes beside the others' is
        not measured twice. On a GPU the units are chosen on the device, and nothing waits.
        """
        if not self._known:
            return
        own = [group for grams in self._known for group in self.policy.groups(grams.names)]
        groups = sent(tuple(own), torch.int64, self.layout.weights.device)
        squares = stacked([found.squares for found in self._known])
        products = stacked([found.products for found in self._known])
        errors = [error.gram for grams in self._known for error in grams.errors]
        hidden = products.square()
        hidden *= sent(tuple([error.gram for error in errors]), torch.float64, hidden.device).unsqueeze(1)
        known = self.norms.measured().index_add_(0, groups, squares)
        poor = (torch.zeros_like(known).index_add_(0, groups, hidden) > REMEASURED * known)[groups]
        anew = poor.device.type != "cpu" or bool(poor.any())
        rests = products
        if anew:
            squares, products = squares.masked_fill(poor, 0), products.masked_fill(poor, 0)
            rests = rests.masked_fill(~poor, 0)
            self._measure(poor, rests)
        self.norms.add_rows(own, squares, errors, products)
        self._known.clear()

    def _measure(self, chosen: torch.Tensor, products: torch.Tensor) -> None:
        """Take norms by the direct route of chosen units, bool ``[uses, units]``, and 0 of the others."""
        every = [len(grams.names) for grams in self._known]
        for grams, theirs, reach in zip(self._known, chosen.split(every), products.split(every)):
            lefts, rights = grams.lefts, grams.rights
            # Scales are for processors, which look at the chosen alone.
            if grams.scales and bool(theirs.any()):
                both = list(zip(*grams.scales))
                lefts, rights = ([f * own for f, own in zip(*side)] for side in ((lefts, both[0]), (rights, both[1])))
            again = ops.chosen_sqnorm(lefts, rights, grams.offsets, theirs)
            errors = [error.direct for error in grams.errors]
            self.norms.add_rows(self.policy.groups(grams.names), again, errors, reach)
