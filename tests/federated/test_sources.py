"""Sources are shared so that no client has far more rows than another."""

from fastdp.federated.partitioning import partition


def test_each_source_goes_to_whoever_has_least_the_largest_first():
    sources = [*"aaaaabbbccdd"]
    parts = partition(len(sources), 2, "source", sources=sources)
    assert sorted(map(len, parts)) == [5, 7]
    assert sorted(row for part in parts for row in part) == list(range(len(sources)))
    assert all(len({n for n, part in enumerate(parts) for row in part if sources[row] == s}) == 1 for s in "abcd")
    assert [len(part) for part in partition(len(sources), 4, "source", sources=sources)] == [5, 3, 2, 2]
