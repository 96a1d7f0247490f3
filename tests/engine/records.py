"""Records that may move a clipped sum by more than its bound, over routes, dtypes, policies and hostile factors.

A record is drawn from a seed: its tokens cancel, agree, tie or spread over sixteen orders of magnitude, huge or tiny. It goes
through the engine's accumulator as captures of a backward pass do; what it adds to the sums is measured in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from fastdp.engine.clip import norms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.axes import RankOne
from fastdp.engine.clip.policy import Policy
from fastdp.engine.uses.factors import Factors
from fastdp.engine.uses.layout import Ticket

KINDS = ("plain", "cancelling", "last bits", "aligned", "grid", "spread")
USES = ("gram", "direct", "instantiate", "twice", "cross", "tied", "table", "bias", "vector", "one example")
POLICIES = ("flat", "groups", "masked", "axes", "wild axes")


@dataclass(frozen=True)
class Case:
    """What is searched: one record, how it is captured, and how it is clipped."""

    seed: int
    kind: str
    uses: str
    policy: str
    dtype: torch.dtype
    tokens: int
    m: int
    n: int
    left_exponent: float
    right_exponent: float
    bound_exponent: float
    two_pass: bool


def _rows(case: Case, width: int, exponent: float, generator: torch.Generator, *, cancels: bool) -> torch.Tensor:
    """Rows of one factor ``[tokens, width]``; the factor that ``cancels`` has its second half opposite the first."""
    half = (case.tokens + 1) // 2
    x = torch.randn(half, width, generator=generator, dtype=torch.float64)
    if case.kind == "grid":
        x = torch.randint(-3, 4, (half, width), generator=generator).double()
    if case.kind == "aligned":
        x = x[:1].expand(half, -1)
    if case.kind == "spread":
        x = x * 10 ** (16 * torch.rand(half, 1, generator=generator, dtype=torch.float64) - 8)
    x = (x * 10**exponent).to(case.dtype)
    sign = -1 if cancels and case.kind != "plain" else 1
    again = (sign * x.double()).to(case.dtype)
    if case.kind == "cancelling":
        gap = 10 ** (-8 * float(torch.rand(1, generator=generator)))
        again = (again.double() * (1 + gap * torch.randn(half, width, generator=generator))).to(case.dtype)
    if case.kind == "last bits":
        up = torch.rand(half, width, generator=generator) < 0.5
        nudged = torch.nextafter(again, torch.full_like(again, torch.inf))
        again = torch.where(up, nudged, again)
    if case.kind == "plain":
        again = torch.randn(half, width, generator=generator, dtype=torch.float64).mul(10**exponent).to(case.dtype)
    return torch.cat([x, again])[: case.tokens].contiguous()


def _factors(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    left = _rows(case, case.m, case.left_exponent, generator, cancels=True)
    return left, _rows(case, case.n, case.right_exponent, generator, cancels=False)


def _policy(case: Case, bound: float) -> Policy:
    both = {"a": 0, "b": 1 if case.policy == "groups" else 0}
    if case.policy == "flat":
        return Policy((bound,), (0.0,), both)
    if case.policy == "groups":
        return Policy((bound, bound / 3), (0.0, 0.0), both)
    generator = torch.Generator().manual_seed(case.seed + 1)
    if "axes" in case.policy:
        # Within 2^10 of 1 either way, or beyond it.
        reach = 3.0 if case.policy == "axes" else 12.0
        drawn = [10 ** (reach * (2 * torch.rand(size, generator=generator) - 1)) for size in (case.m, case.n) * 2]
        return Policy((bound,), (0.0,), both, axes={"a": RankOne(*drawn[:2]), "b": RankOne(*drawn[2:])})
    masks = {name: torch.rand(case.m, case.n, generator=generator) < 0.4 for name in both}
    return Policy((bound, bound / 3), (0.0, 0.0), dict.fromkeys(both, (0, 1)), masks)


def _length(policy: Policy, sums: dict[str, torch.Tensor]) -> float:
    """How long what was added is, in units of what the policy allows; in float64."""
    squares = torch.zeros(len(policy.bounds), dtype=torch.float64)
    for name, total in sums.items():
        group, wide = policy.group_of[name], total.double()
        if isinstance(group, tuple):
            mask = policy.masks[name]
            squares[group[0]] += wide[mask].square().sum()
            squares[group[1]] += wide[~mask].square().sum()
        else:
            squares[group] += wide.square().sum()
    lengths = squares.sqrt() / torch.tensor(policy.bounds, dtype=torch.float64)
    return float(lengths.max())


def moved(case: Case) -> float:
    """How far the record moves the sums, in units of its bound; a sum that is not finite counts as infinite."""
    generator = torch.Generator().manual_seed(case.seed)
    layout = Ticket(torch.zeros(1, dtype=torch.int64), torch.ones(1), True).layout(torch.device("cpu"))
    bound = 10**case.bound_exponent
    parameters = {name: torch.nn.Parameter(torch.zeros(case.m, case.n)) for name in ("a", "b")}
    policy = _policy(case, bound)
    accumulator = Accumulator(parameters, policy)
    a, b = parameters["a"], parameters["b"]
    pairs = [_factors(case, generator) for _ in range(2)]
    if case.uses in ("twice", "cross"):
        # The second use takes back what the first gave, but for its last bits.
        left, right = pairs[0]
        nudged = torch.nextafter(right, torch.full_like(right, torch.inf))
        pairs[1] = (-left, torch.where(torch.rand(right.shape, generator=generator) < 0.5, nudged, right))
    if case.uses == "cross":  # of another length
        zero = torch.zeros(1, case.m, dtype=case.dtype), torch.zeros(1, case.n, dtype=case.dtype)
        pairs[1] = (torch.cat([pairs[1][0], zero[0]]), torch.cat([pairs[1][1], zero[1]]))
    ids = torch.randint(0, case.m, (case.tokens,), generator=generator)
    if case.uses == "one example":
        instances = {n: (left.double().T @ right.double()).float()[None] for n, (left, right) in zip("ab", pairs)}
        accumulator.add_unit(instances, layout.weights)
        return _finite_length(policy, accumulator.sums)
    sinks: list[norms.NormSink] = []
    expected = {"a": 2} if case.uses in ("twice", "cross", "tied") else {}

    def backward(_retain: bool) -> None:
        sink, (first, second) = sinks[-1], pairs
        if case.uses == "vector":
            whole = (first[0].double().T @ first[1].double()).float()
            sink.vector(a, whole[None], layout)
        elif case.uses == "bias":
            sink.tokens(a, first[0].repeat_interleave(case.n, 1), layout, False)
        elif case.uses == "table":
            sink.matrix(a, Factors(ids, first[1]), layout)
        elif case.uses in ("twice", "cross"):
            for left, right in pairs:
                sink.matrix(a, Factors(left, right), layout)
        elif case.uses == "tied":
            # The head takes back, but for its last bits, what the table gave.
            rows = first[1]
            nudged = torch.nextafter(rows, torch.full_like(rows, torch.inf))
            head = -torch.nn.functional.one_hot(ids, case.m).to(case.dtype)
            sink.matrix(a, Factors(ids, rows), layout)
            sink.matrix(a, Factors(head, nudged), layout)
        else:
            sink.matrix(a, Factors(*first), layout)
            sink.matrix(b, Factors(*second), layout)

    route = case.uses if case.uses in ("gram", "direct", "instantiate") else "gram"
    with mock.patch.object(norms, "plan_route", return_value=route):
        accumulator.tables = frozenset({"a"} if case.uses == "tied" else ())
        accumulator.run(backward, sinks.append, layout, expected, two_pass=case.two_pass)  # type: ignore[arg-type]
    return _finite_length(policy, accumulator.sums)


def _finite_length(policy: Policy, sums: dict[str, torch.Tensor]) -> float:
    if not all(bool(torch.isfinite(total).all()) for total in sums.values()):
        return float("inf")
    return _length(policy, sums)
