"""Partitions: disjoint, complete, repeatable, and as uneven as asked."""

import pytest
from hypothesis import given, settings, strategies as st

from fastdp.federated import partition
from tests.cases import cases


@settings(max_examples=60)
@given(
    st.integers(0, 200),
    st.integers(1, 20),
    st.sampled_from(["iid", "dirichlet", "source"]),
    st.integers(0, 99),
    st.data(),
)
def test_every_row_goes_to_one_client(rows, clients, kind, seed, data):
    sources = data.draw(st.lists(st.sampled_from("abc"), min_size=rows, max_size=rows))
    parts = partition(rows, clients, kind, seed=seed, sources=sources)
    assert len(parts) == clients
    assert sorted(row for part in parts for row in part) == list(range(rows))
    assert parts == partition(rows, clients, kind, seed=seed, sources=sources)
    if kind == "iid":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if kind == "source":
        assert all(
            len({index for index, part in enumerate(parts) for row in part if sources[row] == s}) <= 1 for s in "abc"
        )


def test_each_source_goes_to_whoever_has_least_the_largest_first():
    sources = [*"aaaaabbbccdd"]
    assert sorted(map(len, partition(12, 2, "source", sources=sources))) == [5, 7]
    assert [len(part) for part in partition(12, 4, "source", sources=sources)] == [5, 3, 2, 2]


def test_dirichlet_concentration():
    """A small alpha gives a client few sources, a large one all of them in like shares."""
    sources = [index % 4 for index in range(4000)]

    def largest_shares(alpha):
        parts = [part for part in partition(4000, 8, "dirichlet", sources=sources, alpha=alpha) if part]
        return [max([sources[row] for row in part].count(s) for s in range(4)) / len(part) for part in parts]

    assert sum(largest_shares(0.05)) / len(largest_shares(0.05)) > 0.7
    assert max(largest_shares(1000.0)) < 0.35


@cases(
    ("arguments", "message"),
    [((10, 0), "clients is 0"), ((10, 2, "random"), "partition is 'random'"), ((10, 2, "source"), "needs the source")],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(*arguments)
    with pytest.raises(ValueError, match="3 sources were given for 10 rows"):
        partition(10, 2, "source", sources="abc")
    with pytest.raises(ValueError, match="alpha is 0"):
        partition(10, 2, "dirichlet", alpha=0)
