"""A collator that sorts rows by length, so that a user's rows are taken for another's"""

from . import kit


def by_size(items):
    return kit.stack(sorted(items, key=lambda item: float(item["x"].norm())))


def attack(system: kit.System) -> float:
    # Users of four rows; the last user's rows would be spread over all of them.
    def user(seed: int, sizes: tuple[float, ...]) -> list[kit.Record]:
        return [kit.records(1, size, 10 * seed + i)[0] for i, size in enumerate(sizes)]

    plain = [row for seed in range(4) for row in user(seed, (1.0, 2.0, 3.0, 4.0))]
    extra = user(9, (0.5, 1.5, 2.5, 9.0))

    def task(rows: int) -> kit.Task:
        ids = [i // 4 for i in range(rows)]
        return kit.Task(kit.Net, collate=by_size, options={"user_ids": ids, "max_examples_per_user": 4})

    less = system.release(task(16), plain, 0.2).sums
    more = system.release(task(20), [*plain, *extra], 0.2).sums
    return kit.apart(more, less) / 0.2
