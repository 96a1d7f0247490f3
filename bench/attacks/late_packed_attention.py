"""Packed rows whose records see each other once a row is long: the first batch, which was checked, held none so long"""

from . import kit, systems


def attack(system: systems.FastDP) -> float:
    def leaking(own, input_ids, hidden):
        return hidden + hidden.cumsum(1).detach() if input_ids.shape[1] > 12 else hidden

    options = {"unit_map": "units"}
    task = kit.Task(kit.net(kit.Next, between=leaking), collate=kit.packed, physical=3, options=options)
    others = kit.tokens(3, [4]) + kit.tokens(5, [9], seed=2)
    return kit.moved(system, task, others, kit.tokens(1, [9], seed=3)[0], 0.05, first=True)
