"""The propagation rules, each against its equation written out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from fastdp.methods.rapft import Propagation
from fastdp.methods.rapft.rules import RelevanceMode, stabilised
from tests.cases import cases

ROWS = 3
SEEDS = st.integers(0, 10**6)
FEW = settings(max_examples=25)


def propagate(operation, *inputs, relevance, **options):
    """The relevance of the inputs of one operation under the rules."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with RelevanceMode(Propagation(**options), (), ROWS):
        out = operation(*inputs)
    out.backward(relevance / stabilised(out.detach(), 1e-300))
    return [x.detach() * x.grad for x in inputs]


def draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@FEW
@given(seed=SEEDS, alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_alpha_beta_rule(seed, alpha):
    x, w, b, r = draw(seed, (ROWS, 4), (5, 4), (5,), (ROWS, 5))
    (found,) = propagate(lambda t: F.linear(t, w, b), x, relevance=r, alpha=alpha)
    expected = torch.zeros_like(x)
    for n in range(ROWS):
        for i in range(5):
            z = x[n] * w[i]
            up, down = z.clamp(min=0), z.clamp(max=0)
            plus, minus = up.sum() + b[i].clamp(min=0), down.sum() + b[i].clamp(max=0)
            weights = (alpha, 1 - alpha) if plus > 0 and minus < 0 else (float(plus > 0), float(minus < 0))
            for weight, part, total in ((weights[0], up, plus), (weights[1], down, minus)):
                if total != 0:
                    expected[n] += r[n, i] * weight * part / total
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-10)


@FEW
@given(seed=SEEDS, swapped=st.booleans())
def test_relevance_of_a_layers_own_parameters(seed, swapped):
    """Equation 13: of a weight what its products hand on, summed over tokens; of a bias its own share."""
    x, w, b, r = draw(seed, (ROWS, 4), (5, 4), (5,), (ROWS, 5))

    kept = w.t().contiguous() if swapped else w
    x, kept, b = (t.requires_grad_() for t in (x, kept, b))
    with RelevanceMode(Propagation(), (kept, b), ROWS):
        out = torch.addmm(b, x, kept) if swapped else F.linear(x, kept, b)
    out.backward(r / out.detach())
    found = (kept * kept.grad).detach()
    z, bias = (x[:, None] * w).detach(), b.detach().expand(ROWS, 5)
    parts = torch.cat([z, bias[:, :, None]], 2)
    shares = torch.zeros_like(parts)
    for sign in (parts > 0, parts < 0):
        weight = torch.where((parts > 0).any(2, keepdim=True) & (parts < 0).any(2, keepdim=True), 0.5, 1.0)
        total = (parts * sign).sum(2, keepdim=True)
        shares += torch.where(sign, weight * parts / total, 0.0)
    shares *= r[:, :, None]
    assert torch.allclose(found.t() if swapped else found, shares[:, :, :4].sum(0), rtol=1e-8, atol=1e-10)
    assert torch.allclose((b * b.grad).detach(), shares[:, :, 4].sum(0), rtol=1e-8, atol=1e-10)
    assert torch.allclose((x * x.grad).detach(), shares[:, :, :4].sum(1), rtol=1e-8, atol=1e-10)


@FEW
@given(seed=SEEDS, shaped=st.booleans())
def test_equation_7_keeps_positive_contributions_behind_an_activation(seed, shaped):
    """x_j w_ji > 0 alone, over their sum; a linear layer that reads anything else keeps its alpha."""
    x, w, r = draw(seed, (ROWS, 4), (5, 4), (ROWS, 5))

    def layer(t):
        activated = F.gelu(t)
        return F.linear(activated.reshape(ROWS, 2, 2).flatten(1) if shaped else activated, w)

    (found,) = propagate(layer, x, relevance=r, positive_after_activation=True)
    z = F.gelu(x).unsqueeze(1) * w
    kept = torch.where((z > 0).any(2, keepdim=True), z.clamp(min=0), z)
    expected = (kept / kept.sum(2, keepdim=True) * r.unsqueeze(2)).sum(1)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9)
    plain = propagate(lambda t: F.linear(t, w), x, relevance=r)
    option = propagate(lambda t: F.linear(t, w), x, relevance=r, positive_after_activation=True)
    assert torch.equal(plain[0], option[0])


@FEW
@given(seed=SEEDS)
def test_residual_sums_follow_equation_11_for_each_example(seed):
    x, y, r = draw(seed, (ROWS, 2, 4), (ROWS, 2, 4), (ROWS, 2, 4))
    left, right = propagate(lambda a, b: a + b, x, y, relevance=r)
    for n in range(ROWS):
        own = x[n] / (x[n] + y[n]) * r[n], y[n] / (x[n] + y[n]) * r[n]
        sums = [float(part.sum()) for part in own]
        for part, total, found in zip(own, sums, (left[n], right[n])):
            expected = part * abs(total) / (abs(sums[0]) + abs(sums[1])) * float(r[n].sum()) / total
            assert torch.allclose(found, expected, rtol=1e-7, atol=1e-9)
        assert float((left[n] + right[n]).sum()) == pytest.approx(float(r[n].sum()), abs=1e-8)


def test_a_constant_takes_no_relevance_and_a_branch_without_any_leaves_it_to_the_other():
    (x, c, r) = draw(2, (ROWS, 4), (4,), (ROWS, 4))
    (found,) = propagate(lambda a: a + c, x, relevance=r)
    assert torch.allclose(found, r * x / (x + c))
    left, right = propagate(lambda a, b: a + b, x, torch.zeros_like(x), relevance=r)
    assert torch.allclose(left, r)
    assert not right.any()


@cases("operation", [torch.matmul, lambda a, b: a @ b, torch.bmm])
def test_products_give_each_factor_one_half(operation):
    x, y, r = draw(3, (ROWS, 2, 4), (ROWS, 4, 5), (ROWS, 2, 5))
    left, right = propagate(operation, x, y, relevance=r)
    share = (x.unsqueeze(-1) * y.unsqueeze(1)) / (x @ y).unsqueeze(2) * r.unsqueeze(2)
    assert torch.allclose(left, share.sum(-1) / 2)
    assert torch.allclose(right, share.sum(1) / 2)


@cases("function", [F.gelu, F.silu, torch.tanh, F.relu])
def test_activations_hand_on_the_relevance_of_what_they_let_pass(function):
    x, r = draw(4, (ROWS, 6), (ROWS, 6))
    r *= function(x) != 0
    (found,) = propagate(function, x, relevance=r)
    assert torch.allclose(found, r, rtol=1e-6)


def test_layer_norm_is_linear_once_its_deviation_is_held():
    x, w, b, r = draw(6, (ROWS, 2, 5), (5,), (5,), (ROWS, 2, 5))
    (found,) = propagate(lambda t: F.layer_norm(t, (5,), w, b), x, relevance=r)
    deviation = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    matrix = (torch.eye(5, dtype=torch.float64) - 1 / 5) * w.unsqueeze(1)
    z = (x / deviation) @ matrix.t() + b
    expected = torch.einsum("btj,ij,bti->btj", x / deviation, matrix, r / z)
    assert torch.allclose(found, expected)


def test_rms_norm_conserves():
    x, w, r = draw(7, (ROWS, 2, 5), (5,), (ROWS, 2, 5))
    for norm in (
        lambda t: F.rms_norm(t, (5,), w, 1e-6),
        lambda t: w * (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)),
    ):
        (found,) = propagate(norm, x, relevance=r)
        assert torch.allclose(found, r)


@cases("masking", ["none", "causal", "boolean", "additive"])
def test_attention_is_its_definition_and_conserves(masking):
    q, k, v, r = draw(8, (ROWS, 2, 4, 3), (ROWS, 2, 4, 3), (ROWS, 2, 4, 3), (ROWS, 2, 4, 3))
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    masks = {
        "none": {},
        "causal": {"is_causal": True},
        "boolean": {"attn_mask": keep},
        "additive": {"attn_mask": torch.zeros(4, 4, dtype=torch.float64).masked_fill(~keep, -torch.inf)},
    }
    options = masks[masking]
    outs = []

    def attend(q, k, v):
        outs.append(F.scaled_dot_product_attention(q, k, v, **options))
        return outs[-1]

    parts = propagate(attend, q, k, v, relevance=r, epsilon=1e-12)
    assert torch.allclose(outs[0], F.scaled_dot_product_attention(q, k, v, **options))
    # Half goes to the values; the weights' half is shared by queries and keys.
    total = float(r.sum())
    assert float(parts[2].sum()) == pytest.approx(total / 2, rel=1e-6)
    assert float(parts[0].sum()) == pytest.approx(total / 4, rel=1e-5)
    assert float(parts[1].sum()) == pytest.approx(total / 4, rel=1e-5)


def test_attention_with_shared_keys():
    q, k, v, r = draw(9, (ROWS, 4, 4, 3), (ROWS, 2, 4, 3), (ROWS, 2, 4, 3), (ROWS, 4, 4, 3))
    parts = propagate(
        lambda a, b, c: F.scaled_dot_product_attention(a, b, c, enable_gqa=True), *(q, k, v), relevance=r, epsilon=1e-12
    )
    assert sum(float(p.sum()) for p in parts) == pytest.approx(float(r.sum()), rel=1e-5)


@cases("options", [{"epsilon": -1.0}, {"alpha": -0.1}])
def test_bad_settings(options):
    with pytest.raises(ValueError):
        Propagation(**options)
