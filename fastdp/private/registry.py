"""Which models and optimizers a private run drives: none serves two, and a model alone can end its run."""

from __future__ import annotations

import weakref
from typing import Any

import torch

#: Models and optimizers which an engine drives, and their runs; held here, not on them, so that their copies are plain.
_DRIVEN: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register(run: Any, *owners: Any) -> None:
    """State that a run drives a model or an optimizer, from here until `unregister`."""
    for owner in owners:
        _DRIVEN[owner] = weakref.ref(run)


def unregister(*owners: Any) -> None:
    """State that no run drives these any more."""
    for owner in owners:
        _DRIVEN.pop(owner, None)


def drives(owner: Any) -> bool:
    """Whether a model or an optimizer serves a private run."""
    return owner in _DRIVEN


def refuse_driven(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a model or an optimizer that serves a private run already."""
    if model in _DRIVEN:
        raise ValueError(
            "this model is private already: call fastdp.detach(model) to end its first run, then make_private again"
        )
    if optimizer in _DRIVEN:
        raise ValueError("this optimizer already serves a private model; make a new one for each model")


def detach(model: torch.nn.Module) -> None:
    """End the private run that a model is in, as `Private.detach` does, where nobody holds that any more.

    Args:
        model: the model that `make_private` was given.

    Raises ValueError for a model that is in none.

    >>> import fastdp
    >>> model, rows = torch.nn.Linear(3, 1), [{"x": torch.ones(3)}] * 8
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=4)
    >>> for again in range(2):
    ...     model, optimizer, loader = fastdp.make_private(model, optimizer, loader, noise_multiplier=1.0, epochs=1)
    ...     fastdp.detach(model)
    """
    bare: Any = model
    while bare not in _DRIVEN:
        bare = getattr(bare, "_orig_mod", getattr(bare, "module", None))
        if not isinstance(bare, torch.nn.Module):
            raise ValueError("this model is in no private run: give the one that make_private was given")
    run = _DRIVEN[bare]()
    assert run is not None
    run.detach()
