"""User ids that are objects without equality: each row of the same person counts as another person"""

from . import kit
from .nan_user_ids import beside_one


class Person:
    def __init__(self, name: str) -> None:
        self.name = name


def attack(system: kit.System) -> float:
    return beside_one(system, [Person(name) for name in "abbbbbbb"])
