"""A collator that cuts each of its packed records to the shortest: a short record takes tokens from every other"""

from . import kit, systems


def cut(items):
    shortest = min(len(item["input_ids"]) for item in items)
    return kit.packed([{"input_ids": item["input_ids"][:shortest]} for item in items])


def attack(system: systems.FastDP) -> float:
    task = kit.Task(kit.Next, collate=cut, options={"unit_map": "units"})
    return kit.moved(system, task, kit.tokens(12, [9, 12]), kit.tokens(1, [2], seed=3)[0], 0.05)
