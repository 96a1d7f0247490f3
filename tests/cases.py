"""Cases of one test: pairs in place of full products, and quick cases run inside one test."""

import functools
import inspect
import itertools

import torch


def _split(names):
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def pairs(*axes):
    """Rows in which each value of an axis meets each value of every other axis: names and values for `parametrize`.

    A full product grows with the number of axes. Most faults need one value or a pair of them.
    """
    choices = [list(values) for _, values in axes]
    missing = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for a in range(len(choices[i]))
        for b in range(len(choices[j]))
    }
    every, rows = list(itertools.product(*(range(len(values)) for values in choices))), []
    while missing:
        covered = ({(i, r[i], j, r[j]) for i, j in itertools.combinations(range(len(r)), 2)} & missing for r in every)
        best, found = max(zip(every, covered), key=lambda pair: len(pair[1]))
        missing -= found
        rows.append(best)
    names, values = [_split(axis) for axis, _ in axes], []
    for row in rows:
        picked = [choices[i][place] for i, place in enumerate(row)]
        values.append(tuple(v for name, p in zip(names, picked) for v in (p if len(name) > 1 else (p,))))
    return [name for own in names for name in own], values


def cases(names, rows):
    """Run a test once for all rows, each from the same seed; a failure names its row. For cases of milliseconds."""
    names, rows = _split(names), list(rows)

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for row in rows:
                values = dict(zip(names, row if len(names) > 1 else (row,), strict=True))
                torch.manual_seed(0)
                try:
                    test(**fixtures, **values)
                except BaseException as error:
                    if hasattr(error, "add_note"):  # Python 3.11
                        error.add_note(f"The case that failed: {values}")
                    raise

        signature = inspect.signature(test)
        rest = [p for name, p in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=rest)
        return run

    return decorate
