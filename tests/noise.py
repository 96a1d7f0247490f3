"""Replacements of the ops that add noise to sums, for tests of noise that is at fault."""

from functools import partial

from fastdp import ops
from fastdp.ops import add_noise_group_


def noise_ops(draw):
    """`add_noise_` and `add_noise_group_` of which each calls ``draw(total, std, add)`` once for each tensor.

    ``add(x, std)`` adds the noise of the claimed position to ``x``, by the correct op.
    """

    def group(xs, stds, drawn, *, firsts=None, **options):
        for x, std, position, first in zip(xs, stds, drawn.split(1), firsts or [0] * len(xs), strict=True):
            draw(x, std, partial(_add, position, first, options))

    def single(x, std, stream, *, first=0, **options):
        draw(x, std, partial(_add, stream.take().unsqueeze(0), first, options))
        return x

    return {"add_noise_": single, "add_noise_group_": group}


def replace_noise(monkeypatch, draw):
    """Put ``draw`` in the place of both ops, until the test ends."""
    for name, op in noise_ops(draw).items():
        monkeypatch.setattr(ops, name, op)


def _add(position, first, options, x, std):
    add_noise_group_([x], [std], position, firsts=[first], **options)
