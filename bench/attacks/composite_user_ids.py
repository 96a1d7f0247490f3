"""User ids made of several columns, of which one is missing: a tuple that holds NaN equals no other, and each row is a person"""

from . import kit, nan_user_ids


def attack(system: kit.System) -> float:
    return nan_user_ids.beside_one(system, [(0.0, "a"), *[(float("nan"), "b") for _ in range(7)]])
