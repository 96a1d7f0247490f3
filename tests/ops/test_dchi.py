"""``private_snap``: the law of its noise, the law of its tokens, and what its randomness may depend on.

Statistical tests use fixed streams, so the suite does not flicker; each would raise a false alarm for one stream in
10^9, fewer than 50 in 10^9 for the file.
"""

import importlib

import numpy as np
import pytest
import torch
from scipy import stats

from fastdp.ops import dchi_vectors, private_snap, snap
from fastdp.ops.dchi import dchi_noise, gamma_variates
from tests.cases import cases
from tests.ops.test_choice import FALSE_ALARM, chi_square
from tests.ops.uses import by_threads, stream

search = importlib.import_module("fastdp.ops.snap")


def native_noise(n, d, eta=1.0, seed=0):
    """The noise that the CPU kernel adds, float64 [n, d]."""
    return dchi_vectors(torch.full((n,), eta, dtype=torch.float64), d, stream(seed)).double()


@cases("d", [1, 2, 3, 16, 17, 48, 257, 768])
def test_kernel_agrees_with_the_definition(d):
    ours, defined = native_noise(131, d, seed=d), dchi_noise(stream(d).take(), 131, d)
    # A coordinate's error: of its normal, 2^-21 of the row's largest, and of the products, all far below 1e-5.
    assert (ours - defined).abs().max() < 1e-5 * defined.abs().max()


@cases("d", [1, 2, 3, 40, 768])
def test_radius_is_one_gamma_variate_a_token(d):
    radii = gamma_variates(stream(100 + d).take(), 4_000, float(d))
    assert stats.kstest(radii, stats.gamma(d).cdf).pvalue > FALSE_ALARM
    eta = 7.0
    lengths = native_noise(40_000, d, eta, seed=d).norm(dim=1).numpy()
    assert stats.kstest(lengths * eta, stats.gamma(d).cdf).pvalue > FALSE_ALARM
    # A radius drawn per coordinate would make the mean d / eta times sqrt(d + 1).
    assert abs(lengths.mean() * eta / d - 1) < 6.2 / np.sqrt(d * 40_000)


def test_gamma_tails():
    # P(Gamma(3) > 15) = 3.9e-5, P(Gamma(3) < .03) = 4.4e-6: expected 39 and 4.4 in a million.
    radii = native_noise(1_000_000, 3).norm(dim=1).numpy()
    for count, expected in (
        ((radii > 15).sum(), stats.gamma(3).sf(15) * 1e6),
        ((radii < 0.03).sum(), stats.gamma(3).cdf(0.03) * 1e6),
    ):
        assert stats.poisson(expected).ppf(FALSE_ALARM) <= count <= stats.poisson(expected).isf(FALSE_ALARM)


def test_direction_is_uniform():
    noise = native_noise(30_000, 1)
    assert stats.binomtest(int((noise > 0).sum()), 30_000).pvalue > FALSE_ALARM
    noise = native_noise(30_000, 2, seed=1)
    angles = torch.atan2(noise[:, 1], noise[:, 0]).numpy()
    assert stats.kstest(angles, stats.uniform(-np.pi, 2 * np.pi).cdf).pvalue > FALSE_ALARM
    for d in (3, 40):
        noise = native_noise(20_000, d, seed=d)
        unit = noise / noise.norm(dim=1, keepdim=True)
        # Along any axis, drawn at random here, the square of a coordinate is Beta(1/2, (d - 1) / 2).
        axis = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
        along = (unit @ (axis / axis.norm())).numpy()
        assert stats.kstest(along**2, stats.beta(0.5, (d - 1) / 2).cdf).pvalue > FALSE_ALARM
        assert stats.binomtest(int((along > 0).sum()), len(along)).pvalue > FALSE_ALARM
        # Direction and radius are independent.
        lengths = noise.norm(dim=1).numpy()
        assert stats.spearmanr(lengths, along).pvalue > FALSE_ALARM
        assert stats.spearmanr(lengths, along**2).pvalue > FALSE_ALARM


def line_law(points, at, eta):
    """Exact probabilities of the nearest of sorted points on a line to ``at`` plus Laplace noise of scale 1 / eta."""
    edges = np.concatenate([[-np.inf], (points[1:] + points[:-1]) / 2, [np.inf]])
    return np.diff(stats.laplace(at, 1 / eta).cdf(edges))


def plane_law(points, at, eta, angles=20_000):
    """The same in the plane, by integration over the angle: along a ray a row is nearest on one interval of radii.

    The integrand is periodic and smooth but for a few kinks, so the error is of the order of 1 / angles^2.
    """
    turn = (np.arange(angles) + 0.5) * 2 * np.pi / angles
    directions = np.stack([np.cos(turn), np.sin(turn)])
    rays = points - points[at]
    slopes, squares = rays @ directions, (rays**2).sum(1) / 2  # nearest to r u: the largest of r * slope - square
    law = []
    for w in range(len(points)):
        low, high = np.zeros(angles), np.full(angles, np.inf)
        for v in range(len(points)):
            if v == w:
                continue
            gain, need = slopes[w] - slopes[v], squares[w] - squares[v]
            bound = need / gain
            low = np.where(gain > 0, np.maximum(low, bound), low)
            high = np.where(gain < 0, np.minimum(high, bound), high)
        radius = stats.gamma(2, scale=1 / eta)
        law.append(np.mean(np.maximum(radius.cdf(high) - radius.cdf(low), 0)))
    return np.array(law)


@cases("eta", [0.3, 1.0, 4.0])
def test_tokens_on_a_line(eta):
    points = np.array([-2.0, 0.0, 0.25, 1.5, 4.0])
    table = torch.tensor(points, dtype=torch.float32)[:, None]
    for at in (0, 2):
        tokens = private_snap(torch.full((60_000,), at), table, eta, stream(int(10 * eta) + at))
        assert chi_square(tokens, line_law(points, points[at], eta)) > FALSE_ALARM


@cases("eta", [0.5, 2.0])
def test_tokens_in_the_plane(eta):
    points = np.random.default_rng(3).standard_normal((9, 2)).astype(np.float32).astype(np.float64)
    law = plane_law(points, 4, eta)
    assert abs(law.sum() - 1) < 1e-6
    table = torch.tensor(points, dtype=torch.float32)
    tokens = private_snap(torch.full((60_000,), 4), table, eta, stream(int(10 * eta)))
    assert chi_square(tokens, law) > FALSE_ALARM


def test_eta_of_each_token():
    points = np.array([-1.0, 0.0, 1.0])
    table = torch.tensor(points, dtype=torch.float32)[:, None]
    ids = torch.arange(90_000).remainder(3)
    eta = torch.tensor([0.5, 3.0])[torch.arange(90_000).remainder(2)]
    tokens = private_snap(ids, table, eta, stream(1))
    for at in range(3):
        for value in (0.5, 3.0):
            mine = tokens[(ids == at) & (eta == value)]
            assert len(mine) == 15_000
            assert chi_square(mine, line_law(points, points[at], value)) > FALSE_ALARM


def test_place_alone_decides(monkeypatch):
    table, ids = torch.randn(200, 24), torch.randint(0, 200, (200,))
    eta = 1 + 6 * torch.rand(200)
    tokens = private_snap(ids, table, eta, stream(9))
    assert 20 < (tokens == ids).sum() < 180
    assert torch.equal(tokens[:123], private_snap(ids[:123], table, eta[:123], stream(9)))
    other = torch.cat([ids[:60], torch.randint(0, 200, (140,))])
    assert torch.equal(tokens[:60], private_snap(other, table, eta, stream(9))[:60])
    assert torch.equal(tokens.view(20, 10), private_snap(ids.view(20, 10), table, eta.view(20, 10), stream(9)))
    monkeypatch.setattr(search, "BLOCK_ROWS", 33)
    monkeypatch.setattr(search, "TABLE_ROWS", 48)
    assert torch.equal(tokens, by_threads(lambda: private_snap(ids, table, eta, stream(9))))


def test_equal_rows_answer_with_the_lowest_index():
    table = torch.randn(50, 8)
    doubled = torch.cat([table, table])
    tokens = private_snap(torch.arange(100).repeat(20), doubled, 1.0, stream(4))
    assert int(tokens.max()) < 50
    assert (private_snap(torch.arange(50), torch.zeros(50, 8), 1.0, stream(4)) == 0).all()


def test_strides_dtypes_and_empty():
    table, ids, eta = torch.randn(60, 12), torch.randint(0, 60, (40, 2)), 1 + torch.rand(40, 2)
    plain = private_snap(ids[:, 0].clone(), table, eta[:, 0].clone(), stream(6))
    assert torch.equal(plain, private_snap(ids[:, 0], table.t().contiguous().t(), eta[:, 0], stream(6)))
    assert torch.equal(plain, private_snap(ids[:, 0], torch.nn.Parameter(table), eta[:, 0], stream(6)))
    half = table.bfloat16()
    assert torch.equal(private_snap(ids, half, 3.0, stream(6)), private_snap(ids, half.float(), 3.0, stream(6)))
    assert private_snap(ids[:0], table, 1.0, stream()).shape == (0, 2)
    assert private_snap(torch.tensor(5), table, 1e9, stream()).tolist() == 5


def test_noisy_rows_are_snapped_exactly():
    table, ids = torch.randn(500, 96), torch.randint(0, 500, (200,))
    noise = native_noise(200, 96, eta=30.0, seed=8).float()
    assert (private_snap(ids, table, 30.0, stream(8)) == snap(table[ids] + noise, table)).float().mean() > 0.99


def test_refusals():
    table, ids = torch.randn(5, 8), torch.tensor([0, 4])
    nan = table.clone()
    nan[3, 1] = float("nan")
    for args, error, message in (
        ((torch.tensor([5]), table, 1.0), IndexError, "id 5 is outside"),
        ((torch.tensor([-1]), table, 1.0), IndexError, "id -1 is outside"),
        ((ids, table[:0], 1.0), ValueError, "0 rows"),
        ((ids, table[:, :0], 1.0), ValueError, "empty"),
        ((ids, nan, 1.0), ValueError, "row 3 of table"),
        ((ids, table, 0.0), ValueError, "above 0"),
        ((ids, table, -1.0), ValueError, "above 0"),
        ((ids, table, float("nan")), ValueError, "above 0"),
        ((ids, table, float("inf")), ValueError, "above 0"),
        ((ids, table, torch.tensor([1.0, 0.0])), ValueError, "above 0"),
        ((ids, table, 1e-40), ValueError, "eta is so small"),
    ):
        with pytest.raises(error, match=message):
            private_snap(*args, stream())
    etas = torch.ones(2, dtype=torch.float64)
    for bad, width, message in ((etas, 0, "at least 1"), (-etas, 3, "above 0"), (1e-39 * etas, 3, "at least")):
        with pytest.raises(ValueError, match=message):
            dchi_vectors(bad, width, stream())
