"""Norms of many uses by Gram matrices in one launch, kept until it is known whether rounding leaves them good enough."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

import fastdp.ops as ops
from fastdp.engine.bounds import REMEASURED, Errors, Norms, gammas
from fastdp.engine.clip.policy import Policy
from fastdp.engine.clip.sums import Route
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Layout
from fastdp.ops.bounds import stack_rows
from fastdp.ops.gram import counted_gram_norms
from fastdp.ops.matrices import Matrices
from fastdp.ops.placed import CONSTANTS
from fastdp.ops.routes import NARROW, longest_by_gram


class RouteErrors(NamedTuple):
    """Of one use: the errors of its norms by Gram matrices and by the direct route."""

    gram: Errors
    direct: Errors


class RoutedUse(NamedTuple):
    """One use of a parameter, the route to its norms, and their errors."""

    name: str
    use: Factors
    route: Route
    errors: RouteErrors

    @property
    def wide(self) -> bool:
        """Whether its gradients are too large to be made of many uses in one launch."""
        return min(self.route.rows, self.route.columns) > NARROW and not (self.use.finds_norms or self.use.one_hot)


class FactorBatch(NamedTuple):
    """Factors of matrices without a mask over the same tokens, each the only use of its parameter, which `swap`s them."""

    names: tuple[str, ...]
    lefts: Matrices
    rights: Matrices
    swap: bool
    offsets: torch.Tensor
    errors: Sequence[RouteErrors]

    @property
    def sides(self) -> tuple[Matrices, Matrices]:
        """Left and right factors of the parameters as they lie."""
        return (self.rights, self.lefts) if self.swap else (self.lefts, self.rights)

    def taken(self, order: tuple[int, ...]) -> FactorBatch:
        """Those with these numbers."""
        if order == tuple(range(len(self.names))):
            return self
        return self._replace(
            names=tuple([self.names[at] for at in order]),
            lefts=self.lefts.taken(order),
            rights=self.rights.taken(order),
            errors=[self.errors[at] for at in order],
        )


class _GramNorms(NamedTuple):
    """Norms by Gram matrices of uses over the same tokens, ``[uses, units]``, until it is known whether they are good enough."""

    names: Sequence[str]
    lefts: Sequence[torch.Tensor]
    rights: Sequence[torch.Tensor]
    offsets: torch.Tensor
    errors: Sequence[RouteErrors]
    squares: torch.Tensor
    products: torch.Tensor
    #: Of each unit, those that its roundings go by, ``[units]`` or ``[uses, units]``.
    tokens: torch.Tensor
    #: Which units have too many tokens for Gram matrices, and squares of 0 so far: bool ``[units]``, or None for none.
    long: torch.Tensor | None = None
    #: Squares by the direct route, where they are known: the factors are then empty.
    direct: torch.Tensor | None = None


class Grams:
    """What one backward pass finds by Gram matrices, on its way into the ``norms`` of all groups."""

    def __init__(self, norms: Norms, policy: Policy, layout: Layout, launches: bool):
        self.norms, self.policy, self.layout, self._launches = norms, policy, layout, launches
        self._known: list[_GramNorms] = []

    def add(self, found: Sequence[RoutedUse], direct: torch.Tensor | None = None) -> None:
        """Find the norms of uses that read the same input: its Gram matrix serves them all.

        On a processor a unit's own tokens say whether it is long, and left to the direct route; ``direct`` are its squares
        ``[uses, units]`` if they are known already.
        """
        names, uses, _, errors = zip(*found)
        lefts, right = [use.left for use in uses], uses[0].right
        offsets, long = uses[0].offsets(self.layout), None
        if self._launches:
            tokens = ops.token_counts(lefts, [right] * len(lefts), offsets)
            squares, products = ops.gram_norms(lefts, [right], [len(lefts)], offsets)
        else:
            most = longest_by_gram(sum([use.width for use in uses]), right.shape[1])
            squares, products, tokens = counted_gram_norms(lefts, right, offsets, most)
            if float(tokens.max()) > most:
                long = tokens > most
                products = torch.where(long, torch.stack([use.row_products(self.layout) for use in uses]), products)
        if direct is not None:
            lefts, right = [], right[:0]
        rights = [right] * len(lefts)
        self._known.append(_GramNorms(names, lefts, rights, offsets, errors, squares, products, tokens, long, direct))

    def add_batch(self, batch: FactorBatch) -> None:
        """Find all norms of a batch by Gram matrices in one launch: each input's once for the uses that follow each other."""
        counts = batch.rights.counts
        firsts = (0, *itertools.accumulate(counts[:-1]))
        norms = ops.gram_norms(batch.lefts, batch.rights.taken(firsts), counts, batch.offsets)
        tokens = ops.token_counts(batch.lefts, batch.rights, batch.offsets)
        self._known.append(
            _GramNorms(batch.names, batch.lefts, batch.rights, batch.offsets, batch.errors, *norms, tokens)
        )

    def add_direct(self, found: RoutedUse, squares: torch.Tensor, products: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take norms by the direct route ``[units]`` as if Gram matrices had given them: their bound is the same."""
        rows = found.use.offsets(self.layout), [found.errors], squares[None], products[None], tokens
        self._known.append(_GramNorms([found.name], [], [], *rows, direct=squares[None]))

    def judge(self) -> None:
        """Take the norms found by Gram matrices, and find those of the units anew for which they are not good enough.

        A unit's group decides, over all that is known of it, so that a matrix whose gradient vanishes beside the others' is
        not measured twice. On a GPU the units are chosen on the device, and nothing waits.
        """
        if not self._known:
            return
        own = [group for grams in self._known for group in self.policy.groups(grams.names)]
        groups = CONSTANTS[tuple(own), torch.int64, self.layout.weights.device]
        squares = stack_rows([found.squares for found in self._known])
        products = stack_rows([found.products for found in self._known])
        errors = [error.gram for grams in self._known for error in grams.errors]
        tokens = torch.cat([found.tokens.expand(len(found.names), -1) for found in self._known])
        if any(found.long is not None for found in self._known):
            none = torch.zeros_like(tokens[0], dtype=torch.bool)
            rows = [(none if found.long is None else found.long).expand(len(found.names), -1) for found in self._known]
            long = torch.cat(rows)
            self._measure(long, products.masked_fill(~long, 0), tokens)
            products = products.masked_fill(long, 0)
        gram_error = products.square()
        gram_error *= gammas([error.gram for error in errors], tokens)
        known = self.norms.measured().index_add_(0, groups, squares)
        too_large = torch.zeros_like(known).index_add_(0, groups, gram_error) > REMEASURED * known
        imprecise = too_large[groups] & (products > 0)
        if self._launches or bool(imprecise.any()):
            self._measure(imprecise, products.masked_fill(~imprecise, 0), tokens)
            squares, products = squares.masked_fill(imprecise, 0), products.masked_fill(imprecise, 0)
        self.norms.add_rows(own, squares, errors, products, tokens)
        self._known.clear()

    def _measure(self, chosen: torch.Tensor, products: torch.Tensor, tokens: torch.Tensor) -> None:
        """Take norms by the direct route of chosen units, bool ``[uses, units]``, and 0 of the others."""
        every = [len(grams.names) for grams in self._known]
        given = [grams for grams in self._known if grams.direct is not None]
        if given:
            # All of them at once: on a GPU there may be one a matrix.
            known = [grams.direct is not None for grams in self._known for _ in grams.names]
            places = tuple([at for at, own in enumerate(known) if own])
            index = CONSTANTS[places, torch.int64, chosen.device]
            theirs, *rows = (each.index_select(0, index) for each in (chosen, products, tokens))
            again = torch.where(theirs, stack_rows([grams.direct for grams in given if grams.direct is not None]), 0)
            errors = [error.direct for grams in given for error in grams.errors]
            self.norms.add_rows(
                self.policy.groups([name for grams in given for name in grams.names]), again, errors, *rows
            )
        for grams, theirs, *rows in zip(self._known, *(each.split(every) for each in (chosen, products, tokens))):
            if grams.direct is not None:
                continue
            errors = [error.direct for error in grams.errors]
            again = ops.chosen_sqnorm(grams.lefts, grams.rights, grams.offsets, theirs)
            self.norms.add_rows(self.policy.groups(grams.names), again, errors, *rows)
