"""How a simulation shares one data set among clients: evenly at random, by Dirichlet shares of each source, or by source."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

PARTITIONINGS = ("iid", "dirichlet", "source")


def partition(
    rows: int,
    clients: int,
    kind: str = "iid",
    *,
    seed: int = 0,
    sources: Sequence[Hashable] | None = None,
    alpha: float = 0.5,
) -> list[list[int]]:
    """The rows of each client: disjoint, together all of them, the same for the same arguments on every machine.

    Args:
        rows: number of rows.
        clients: number of clients.
        kind: ``iid`` deals shuffled rows evenly; ``dirichlet`` deals each source by shares drawn from a symmetric
            Dirichlet law of concentration ``alpha`` (Hsu et al., arXiv 1909.06335; without ``sources`` the rows are one
            source, so that clients differ in size alone); ``source`` gives each source whole to one client, largest first
            to whoever has least.
        sources: the source or label of each row.

    A client may end up with no row; it then refuses to train, and the round goes on without it.

    Raises:
        ValueError: for an unknown kind, numbers out of range, sources of another length or missing.
    """
    if kind not in PARTITIONINGS:
        raise ValueError(f"partition is {kind!r}: use one of {', '.join(PARTITIONINGS)}")
    if clients < 1:
        raise ValueError(f"clients is {clients}: there must be at least one")
    if sources is not None and len(sources) != rows:
        raise ValueError(f"{len(sources)} sources were given for {rows} rows: give one for each")
    rng = np.random.default_rng([seed, rows, clients])
    if kind == "iid":
        return [part.tolist() for part in np.array_split(rng.permutation(rows), clients)]
    groups = _groups(rows, sources)
    if kind == "dirichlet":
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}: the concentration of a Dirichlet law is positive")
        return _by_shares(groups, clients, alpha, rng)
    if sources is None:
        raise ValueError("partition by source needs the source of each row")
    return _by_source(groups, clients)


def _groups(rows: int, sources: Sequence[Hashable] | None) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for row in range(rows):
        found.setdefault(None if sources is None else sources[row], []).append(row)
    return list(found.values())


def _by_shares(groups: list[list[int]], clients: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(clients)]
    for group in groups:
        shares = rng.dirichlet(np.full(clients, alpha))
        cuts = np.floor(np.cumsum(shares)[:-1] * len(group) + 0.5).astype(int)
        for part, piece in zip(parts, np.split(rng.permutation(group), cuts)):
            part += piece.tolist()
    return parts


def _by_source(groups: list[list[int]], clients: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(clients)]
    for group in sorted(groups, key=len, reverse=True):
        min(parts, key=len).extend(group)
    return parts
