"""A collator that cuts every record to the shortest lets one short record change all the others"""

from . import kit
from .left_padding import model


def shortest(items):
    length = min(len(item["input_ids"]) for item in items)
    return kit.padded([{"input_ids": item["input_ids"][:length]} for item in items])


def attack(system: kit.System) -> float:
    return kit.moved(system, kit.Task(model, collate=shortest), kit.tokens(12, [20]), kit.tokens(1, [3], seed=3)[0])
