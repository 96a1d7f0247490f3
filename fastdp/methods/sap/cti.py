"""Adaptive perturbation of contributing tokens: the paper's form, and two whose bound holds.

`paper` gives each token noise of its own eta. The ratio of two tokens' output densities is then unbounded, or does not
vanish with their distance: d_chi privacy holds only between tokens of equal eta. In the sound forms, too, tokens that
matter to the task survive more often:

* ``prior``: Pr[w | x] ~ exp(tilt UI_w) exp(-eta dist(x, w) / 2), which is eta dist(x, x') private;
* ``quotient``: the vocabulary in a few cells of like importance, told by randomised response: epsilon for any two tokens,
  nothing within a cell (`fastdp.methods.sap.quotient`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import fastdp.accounting as accounting
import fastdp.files as files
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.statements import COUNTED_TEXT, NOISED_COUNTS
from fastdp.methods.public import PublicText, describe_origin
from fastdp.methods.removed import replace_removed
from fastdp.methods.sap.importance import (
    adaptive_eta,
    count_tokens,
    middle_importance,
    noised_counts,
    utility_importance,
)
from fastdp.methods.sap.quotient import equal_mass_cells, informative_cells
from fastdp.ops.stream import NoiseStream
from fastdp.validate import at_least, fraction, one_of

CTI_FORMS = ("prior", "quotient", "paper")
#: Cells of the quotient form where nobody asks for others, and occurrences that a token needs to be favoured.
CELLS = 5
_SUPPORT = 20.0

_NOT_METRIC = (
    "eta depends on the token that it protects: the bound eta * distance holds only between tokens of equal eta, and "
    "between others no bound that vanishes with their distance does"
)
_REVEALED = (
    "counts of the private texts reveal them: count public texts, or noise the counts (noise_multiplier, noised_counts) and "
    "account for their event"
)
_PRIVATE_COUNTS = "the importance of tokens was counted in the private texts and their labels without noise"


@replace_removed
@dataclass(frozen=True)
class CTI:
    """Which tokens contribute to which class, and how a privatizer favours them.

    Attributes:
        importance: float64 [classes, tokens], one column for each row of the embedding table.
        supported: bool [tokens], which tokens may be favoured; ``paper`` favours any.
        source: ``public``, ``private`` (allowed in the `paper` form only), or the event of `noised_counts`.
        form: see the module.
        tilt: exponent of the prior, at least 0. With 1, a token that is k times likelier in its class than elsewhere is drawn k
            times as often.
        delta: at which the epsilon of noised counts is stated.
        origin: the file that public counts came from, for the statement.
        cells: int64 [tokens], the cell of each; ``quotient`` only.
        mass: float64 [tokens], how often each was counted; ``quotient`` only.
    """

    importance: Tensor
    supported: Tensor
    source: str | DpEvent
    form: str = "prior"
    tilt: float = 1.0
    delta: float = 1e-5
    origin: PublicText | None = None
    cells: Tensor | None = None
    mass: Tensor | None = None

    def __post_init__(self) -> None:
        one_of(CTI_FORMS, form=self.form)
        if isinstance(self.source, str) and self.source not in ("public", "private"):
            raise ValueError("source is 'public', or the event of noised_counts, or (paper form only) 'private'")
        if self.source == "private" and self.form != "paper":
            raise ValueError(_REVEALED)
        at_least(0, tilt=self.tilt)
        fraction(delta=self.delta)
        if self.importance.dim() != 2 or self.supported.shape != self.importance.shape[1:]:
            raise ValueError("importance must be [classes, tokens] and supported [tokens]")
        if not bool(torch.isfinite(self.importance).all()):
            raise ValueError("importance must be finite: smooth the counts")
        for name, value in (("cells", self.cells), ("mass", self.mass)):
            if (value is None) == (self.form == "quotient") or (
                value is not None and value.shape != self.supported.shape
            ):
                raise ValueError(f"{name} belongs to the quotient form, with one entry for each token: use from_counts")

    @classmethod
    def from_counts(
        cls,
        counts: Tensor,
        *,
        source: str | DpEvent,
        form: str = "prior",
        min_support: float | None = None,
        tilt: float = 1.0,
        cells: int | None = None,
        told_at: float | None = None,
    ) -> CTI:
        """Make a CTI from counts [classes, tokens] of how often each token occurs in each class.

        Args:
            source, form, tilt: as above.
            min_support: occurrences, over all classes, with which a token has importance; by default 20, ``quotient`` 0. A rare
                token that one class alone has (a name, say) would otherwise be protected least.
            cells, told_at: ``quotient``: number of cells, by default 5; and the epsilon at which they reveal most about the
                class (`informative_cells`). By default cells have equal mass.
        """
        counts = torch.as_tensor(counts)
        importance, mass = utility_importance(counts), counts.double().sum(0)
        if form != "quotient" and (cells is not None or told_at is not None):
            raise ValueError("cells and told_at belong to form='quotient': leave them out")
        if form == "quotient":
            supported = mass >= (min_support or 0.0)
            importance, mass, number = importance * supported, mass * supported, CELLS if cells is None else cells
            if told_at is None:
                found = equal_mass_cells(importance, mass, number)
            else:
                found = informative_cells(counts * supported, importance, number, told_at)
            return cls(importance, supported, source, form=form, tilt=tilt, cells=found, mass=mass)
        supported = torch.ones_like(mass, dtype=torch.bool)
        if form != "paper":
            supported = mass >= (_SUPPORT if min_support is None else min_support)
            importance = torch.where(supported, importance, importance.clamp(max=0.0))
        return cls(importance, supported, source, form=form, tilt=tilt)

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[Sequence[int]],
        labels: Sequence[int],
        *,
        classes: int,
        vocabulary: int,
        public: bool,
        noise_multiplier: float | None = None,
        max_norm: float = 5.0,
        delta: float = 1e-5,
        origin: PublicText | None = None,
        stream: NoiseStream | None = None,
        **form: Any,
    ) -> CTI:
        """Make a CTI from tokenized texts: public ones, or private ones, whose counts get the noise of `noised_counts`.

        Args:
            labels: class of each text, below ``classes``.
            vocabulary: rows of the embedding table.
            noise_multiplier, max_norm: of the counts of private texts; see `noised_counts`.
            form: form, min_support, tilt, cells and told_at, as for `from_counts`. With noise, min_support is
                by default at least 4 times the std of a token's count over all classes.

        Raises ValueError as `from_counts` and `noised_counts` do; for public texts with noise, and for private texts
        without it except in the `paper` form, which then says that it guarantees nothing.
        """
        if public and noise_multiplier is not None:
            raise ValueError("counts of public texts need no noise: leave noise_multiplier out, or the public texts")
        if not public and noise_multiplier is None and form.get("form") != "paper":
            raise ValueError(_REVEALED)
        source: str | DpEvent = "public" if public else "private"
        if noise_multiplier is None:
            counts = count_tokens(texts, labels, classes, vocabulary)
        else:
            counts, source = noised_counts(
                texts,
                labels,
                classes,
                vocabulary,
                noise_multiplier=noise_multiplier,
                max_norm=max_norm,
                stream=stream or NoiseStream(),
            )
            if form.get("min_support") is None:
                form["min_support"] = max(_SUPPORT, 4 * math.sqrt(classes) * noise_multiplier * max_norm)
        return replace(cls.from_counts(counts, source=source, **form), delta=delta, origin=origin)

    @property
    def classes(self) -> int:
        return self.importance.shape[0]

    def importance_of(self, label: int | None) -> Tensor:
        """Importance of each token [tokens] to a class; None, as in inference, takes the largest over classes."""
        if label is None:
            return self.importance.amax(0)
        if not 0 <= label < self.classes:
            raise ValueError(f"label {label} is not one of {self.classes} classes")
        return self.importance[label]

    def eta_of(self, label: int | None, eta0: float) -> Tensor:
        """Eta of each token [tokens] in the `paper` form, equation (6)."""
        return adaptive_eta(self.importance_of(label), eta0, middle_importance(self.importance))

    def flaws(self) -> list[str]:
        """Why the form carries no metric bound; empty for the sound ones."""
        found = [_NOT_METRIC] if self.form == "paper" else []
        return found + ([_PRIVATE_COUNTS] if self.source == "private" else [])

    def claim(self) -> accounting.Gaussian | None:
        """The claim of noised counts, for one text with its label; None where no noise was added."""
        if isinstance(self.source, str):
            return None
        return accounting.Gaussian(COUNTED_TEXT, "add_remove", self.source, self.delta)

    def epsilon_of_counts(self) -> float:
        """What the counts cost at ``delta``, for one text with its label, added or removed; inf for `private` ones."""
        if isinstance(self.source, str):
            return 0.0 if self.source == "public" else math.inf
        return float(accounting.epsilon(self.source, self.delta))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file atomically. Keep it: drawing noised counts a second time is a second release."""
        source = self.source if isinstance(self.source, str) else accounting.serialise(self.source)
        with files.atomic_path(path) as temporary:
            torch.save({**vars(self), "source": source, "origin": self.origin and self.origin.describe()}, temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CTI:
        """What `save` wrote."""
        kept = torch.load(path, weights_only=True)
        kept.pop("c0", None)  # a field that earlier versions wrote
        source, origin = kept["source"], kept.get("origin")
        kept["source"] = source if isinstance(source, str) else accounting.deserialise(source)
        return cls(**{**kept, "origin": origin and PublicText(**origin)})

    def describe(self) -> dict[str, Any]:
        return {
            "form": self.form,
            "tilt": self.tilt if self.form == "prior" else None,
            "c0": middle_importance(self.importance) if self.form == "paper" else None,
            "cells": None if self.cells is None else int(self.cells.max()) + 1,
            "supported_tokens": int(self.supported.sum()),
            "counts": self.source if isinstance(self.source, str) else NOISED_COUNTS,
            "public_text": describe_origin(self.origin) if self.source == "public" else None,
        }
