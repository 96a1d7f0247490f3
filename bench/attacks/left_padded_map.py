"""A noised relevance map of left-padded text: one long record shifts the positions, and so the maps, of everyone else"""

import functools

from . import kit, left_padding, systems


def attack(library: systems.FastDP) -> float:
    task = kit.Task(left_padding.model, collate=functools.partial(kit.padded, left=True))
    return library.map_moves(task, kit.tokens(12, [6, 7, 9]), kit.tokens(1, [40], seed=3)[0])
