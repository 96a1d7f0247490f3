"""Which norms are bounded, and by how much: one norm over all parameters, one a module, or one a named group."""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastdp.engine.clip.policy import Policy
from fastdp.ops.bounds import LARGEST_RATIO
from fastdp.validate import positive

#: The clipping threshold C of the whole; or one a group, by the group's name.
Bounds = float | Mapping[str, float]
#: Shell patterns over parameter names by group (the first match wins); ``per_layer``; None for one norm over everything.
Groups = Mapping[str, Sequence[str]] | str | None


def check_clipping(max_grad_norm: Bounds, groups: Groups) -> None:
    """Raise ValueError for a threshold that is not positive, or groups that are neither named nor ``per_layer``."""
    if not (groups in (None, "per_layer") or isinstance(groups, Mapping)):
        raise ValueError(f"groups is {groups!r}: give 'per_layer' or a mapping from names to patterns")
    for bound in max_grad_norm.values() if isinstance(max_grad_norm, Mapping) else [max_grad_norm]:
        positive(max_grad_norm=bound)
        if bound * LARGEST_RATIO < 1:
            warnings.warn(
                f"max_grad_norm is {bound:g}: gradients more than 2^40 times as long are left out, so that ordinary ones add "
                "nothing. Raise it.",
                stacklevel=3,
            )


def clip_groups(
    parameters: Mapping[str, torch.Tensor], noise_multiplier: float, max_grad_norm: Bounds, groups: Groups = None
) -> Policy:
    """Clipping of each group on its own, at a noise multiplier of the whole.

    Every coordinate gets the same noise, noise_multiplier times sqrt(sum_k C_k^2): K groups are one vector whose
    sensitivity is the norm of their bounds.
    """
    group_of, names = _groups(parameters, groups)
    if isinstance(max_grad_norm, Mapping):
        missing = [name for name in names if name not in max_grad_norm]
        if missing:
            raise ValueError(f"max_grad_norm has no entry for the group '{missing[0]}'")
        bounds = tuple(float(max_grad_norm[name]) for name in names)
    else:
        # One threshold for several groups is the threshold of the whole, shared equally.
        bounds = (float(max_grad_norm) / math.sqrt(len(names)),) * len(names)
    std = noise_multiplier * math.hypot(*bounds)
    if std and not 2.0**-100 <= std <= 2.0**100:
        raise ValueError(
            f"max_grad_norm {math.hypot(*bounds):g} times the noise multiplier {noise_multiplier:g} is beyond the range of "
            "float32: choose a bound nearer to 1"
        )
    return Policy(bounds, (std,) * len(bounds), group_of)


def _groups(parameters: Mapping[str, torch.Tensor], groups: Groups) -> tuple[dict[str, int], list[str]]:
    if groups is None:
        return dict.fromkeys(parameters, 0), ["all"]
    if isinstance(groups, str):
        layers = [name.rpartition(".")[0] for name in parameters]
        names = list(dict.fromkeys(layers))
        return {name: names.index(layer) for name, layer in zip(parameters, layers)}, names
    names = list(groups)
    group_of = {}
    for name in parameters:
        matched = [any(fnmatch.fnmatch(name, pattern) for pattern in patterns) for patterns in groups.values()]
        if not any(matched):
            raise ValueError(f"no group's pattern matches the trained parameter '{name}'; add a group for it")
        group_of[name] = matched.index(True)
    return group_of, names


def describe_clipping(max_grad_norm: Bounds, groups: Groups) -> dict[str, Any]:
    """For the card."""
    return {
        "max_grad_norm": dict(max_grad_norm) if isinstance(max_grad_norm, Mapping) else max_grad_norm,
        "groups": {k: list(v) for k, v in groups.items()} if isinstance(groups, Mapping) else groups,
    }
