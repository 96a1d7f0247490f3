"""Rap-FT through `make_private`: sensitivity of what is released, budgets, cards, refusals, refreshed and resumed masks."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp import DPSGD, accounting
from fastdp.methods.rapft import (
    NoisyMap,
    PrivateSubset,
    Propagator,
    PublicGradients,
    PublicMap,
    RapFT,
    effective_noise_multiplier,
    rank_one,
    second_moments,
)
from fastdp.optim import AdamW
from fastdp.private.preparation import Findings, add_clipped
from tests.cases import cases
from tests.engine.reference import known
from tests.engine.runs import Classifier, collate, examples, join, loader, logical_step, one_by_one, start


def public(seed=9):
    return PublicMap([collate(examples(6, seed))])


def gradients_of(*rows):
    """Single public examples."""
    return PublicGradients([collate([row]) for row in examples(4, 9)[slice(*rows)]])


MODES = {
    "printed": RapFT(public()),
    "optimal": RapFT(public(), allocation="optimal"),
    "noised map": RapFT(NoisyMap(2.0, 0.5)),
    "paper": RapFT(public(), mode="paper"),
    "axes of gradients": RapFT(gradients_of(4), allocation="axes"),
    "axes of a map": RapFT(public(), allocation="axes"),
}


@cases("name", MODES)
def test_every_mode_releases_clipped_gradients_with_the_noise_it_accounts_for(name):
    """Blocks each on its own; along axes the whole, in their own coordinates, of which larger ones get more noise."""
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=0.0, fused=False)
    private = start(model, method=MODES[name], optimizer=optimizer, noise_multiplier=0.8, target_delta=1e-3)
    gradients, batches = logical_step(private)
    policy, parameters = private.policy, dict(model.named_parameters())
    multiplier = effective_noise_multiplier(0.8, 0.7) if name == "paper" else 0.8
    assert [private.noise_multiplier, policy.noise_multiplier] == pytest.approx([multiplier] * 2)
    axes = {n: policy.axes[n].whole(p.shape) if policy.axes else torch.ones(p.shape) for n, p in parameters.items()}
    sizes = torch.cat([s.reshape(-1) for s in axes.values()])
    assert float(sizes.square().mean()) == pytest.approx(1.0, rel=1e-5)
    assert (float(sizes.max() / sizes.min()) > 2) == ("axes" in name)
    masks = {n: p.new_ones(p.shape).bool() if policy.axes else private.outcome[n].bool() for n, p in parameters.items()}
    exact = [{n: g / axes[n].double() for n, g in own.items()} for own in one_by_one(Classifier(), join(batches))]
    sides = (masks, {n: ~m for n, m in masks.items()})[: len(policy.bounds)]
    squares = [[sum(g[n][m].square().sum() for n, m in side.items()) for g in exact] for side in sides]
    scales = policy.scales(known(torch.tensor(squares)))
    standard = []
    for parameter, mask in masks.items():
        expected = sum(
            g[parameter] * torch.where(mask, float(scales[0, i]), float(scales[-1, i])) for i, g in enumerate(exact)
        )
        std = torch.where(mask, policy.stds[0], policy.stds[-1])
        standard.append(((gradients[parameter] * 8 / axes[parameter] - expected) / std).reshape(-1))
    # 66 squared normals of a fixed seed, in a range that one key in 10^5 leaves; noise at a half or double has .25 or 4.
    assert 0.4 < float(torch.cat(standard).square().mean()) < 2.0
    assert private.card()["mechanism"]["allocation"] == MODES[name].allocation


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), log_scale=st.floats(-8, 6), max_norm=st.floats(0.1, 10), broken=st.booleans())
def test_one_example_moves_the_sum_of_maps_by_at_most_its_bound(seed, log_scale, max_norm, broken):
    generator = torch.Generator().manual_seed(seed)
    maps = {"a": 10**log_scale * torch.randn(3, 4, 2, generator=generator), "b": torch.randn(3, 5, generator=generator)}
    if broken:
        maps["a"][2, 0, 0] = torch.nan if seed % 2 else torch.inf
    with_it = {name: torch.zeros(m.shape[1:]) for name, m in maps.items()}
    without = {name: torch.zeros(m.shape[1:]) for name, m in maps.items()}
    add_clipped(with_it, maps, max_norm)
    add_clipped(without, {name: m[:2] for name, m in maps.items()}, max_norm)
    moved = math.sqrt(sum(float((with_it[n] - without[n]).double().square().sum()) for n in maps))
    assert moved <= max_norm * (1 + 1e-5)


def test_the_budget_holds_steps_and_maps():
    method = RapFT(NoisyMap(1.5, 0.5), map_every=2)
    private = start(Classifier(), method=method, target_epsilon=3.0, target_delta=1e-3, unsafe_seed=None)
    for _ in range(2):
        iterator = iter(private.data_loader)
        for _ in range(3):
            logical_step(private, iterator)
    assert private.ledger.spent("relevance") == 3
    assert private.steps_done == 6
    assert 2.9 < private.epsilon() <= 3.0
    steps = accounting.dpsgd(private.noise_multiplier, private.sample_rate, 6)
    both = accounting.compose(steps, accounting.dpsgd(1.5, 0.5, 3))
    assert private.epsilon() == pytest.approx(float(accounting.epsilon(both, 1e-3)))


def test_axes_of_ones_are_no_axes_to_the_last_bit():
    """Over several microbatches."""
    sums = []
    for method in (RapFT(gradients_of(4), allocation="axes", axes_power=0.0), DPSGD()):
        private = start(Classifier(), method=method, noise_multiplier=0.0, max_physical_batch_size=2)
        sums.append(logical_step(private)[0])
        private.detach()
    assert all(torch.equal(sums[0][name], wanted) for name, wanted in sums[1].items())


@settings(max_examples=100)
@given(seed=st.integers(0, 10**6), power=st.floats(0, 1), empty=st.booleans())
def test_axes_have_rank_one_and_mean_square_one(seed, power, empty):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"a": torch.rand(5, 4, generator=generator).pow(8), "b": torch.rand(7, generator=generator)}
    if empty:
        sizes["a"] = torch.zeros(5, 4)
    found = rank_one(sizes, power)
    whole = {name: axes.whole(sizes[name].shape).double() for name, axes in found.items()}
    assert float(torch.cat([s.reshape(-1) for s in whole.values()]).square().mean()) == pytest.approx(1.0, rel=1e-5)
    assert torch.linalg.matrix_rank(whole["a"], rtol=1e-5) == 1
    if power == 0 or empty:
        assert float(whole["a"].max() - whole["a"].min()) < 1e-6
    # A row that is larger throughout gets the larger axis.
    rows = sizes["a"].mean(1)
    if not empty:
        assert bool((whole["a"][:, 0][rows.argmax()] >= whole["a"][:, 0] * (1 - 1e-6)).all())


@pytest.mark.parametrize("power", [0.25, 1.0])
def test_a_parameter_without_sizes_is_taken_for_one_of_middling_size(power):
    """Its axis is that of the mean of the others, however small these are."""
    for size in (1e-3, 4.0):
        sizes = {"a": torch.full((3, 4), size), "b": torch.zeros(2, 5), "c": torch.full((6,), 3 * size)}
        axes = {name: own.whole(sizes[name].shape) for name, own in rank_one(sizes, power).items()}
        ratio = float(axes["b"].mean() / axes["a"].mean())
        assert ratio == pytest.approx(2**power, rel=1e-5)
        assert float(axes["c"].mean() / axes["a"].mean()) == pytest.approx(3**power, rel=1e-5)


def test_second_moments_are_those_of_public_gradients():
    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier()

        def forward(self, **batch):
            return type("Output", (), {"loss": self.inner(**batch)["loss"]})

    model, data = Output(), [collate(examples(4, seed)) for seed in (1, 2)]
    found = second_moments(model, data)
    mean = [one_by_one(Classifier(), batch) for batch in data]
    for name, size in found.items():
        whole = [sum(g[name.removeprefix("inner.")] for g in own) / 4 for own in mean]
        wanted = (sum(g.square() for g in whole) / 2).sqrt()
        assert torch.allclose(size.double(), wanted, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="no public batches"):
        second_moments(model, [])


def test_axes_of_public_gradients_follow_the_weights_and_cost_nothing():
    source = gradients_of(4)
    method = RapFT(source, allocation="axes", map_every=2)
    model = Classifier()
    private = start(
        model, method=method, optimizer=AdamW(model.parameters(), lr=0.5), noise_multiplier=0.8, target_delta=1e-3
    )
    later, outcomes = Classifier(), []
    for step in range(4):
        logical_step(private)
        outcomes.append(private.outcome)
        if step == 1:
            # Axes for the next step are made once this one is done.
            later.load_state_dict(model.state_dict())
    assert outcomes[1] is outcomes[2]
    for then, outcome in ((Classifier(), outcomes[0]), (later, outcomes[1])):
        for name, axis in rank_one(second_moments(then, source.batches), 0.5).items():
            assert torch.allclose(outcome[name], torch.cat([axis.rows, axis.columns]), rtol=1e-4)
    assert any(not torch.allclose(outcomes[0][name], after, rtol=0.05) for name, after in outcomes[1].items())
    assert private.policy.noise_multiplier == pytest.approx(0.8)
    assert private.ledger.spent_steps == 4
    assert not private.plan.side
    assert accounting.verify(private.card()).holds


def test_a_few_public_gradients_are_taken_by_turns_and_the_same_again():
    singles = [collate([row]) for row in examples(4, 9)]
    model, source = Classifier(), PublicGradients(singles, at_once=1)
    parameters = dict(model.named_parameters())
    each = [second_moments(model, [single])["first.weight"] for single in singles]
    drawn = []
    for step in (*range(6), *range(6)):
        found = source.relevance(None, Findings(None, model, parameters, step, {}))["first.weight"]
        drawn.append([torch.equal(found, one) for one in each].index(True))
    assert drawn[:6] == drawn[6:]
    assert len(set(drawn)) > 1
    with pytest.raises(ValueError, match="at_once is 5: it must lie between 1 and the 4 batches"):
        PublicGradients(singles, at_once=5)


def test_masks_follow_the_model():
    model = Classifier()
    private = start(
        model,
        method=RapFT(public(), map_after=1, map_every=1),
        optimizer=torch.optim.SGD(model.parameters(), lr=10.0),
        noise_multiplier=0.0,
        epochs=1,
    )
    iterator = iter(private.data_loader)
    assert private.outcome == {}
    assert private.policy.group_of["first.weight"] == 0
    assert RapFT(public()).policy(dict(model.named_parameters()), 0.7).noise_multiplier == pytest.approx(0.7)
    logical_step(private, iterator)
    first = dict(private.outcome)
    logical_step(private, iterator)
    assert any(not torch.equal(first[n], private.outcome[n]) for n in first)


@given(st.floats(1e-28, 1e28), st.floats(0.1, 10))
def test_without_a_mask_the_noise_is_that_of_one_bound_to_the_last_bit(bound, multiplier):
    policy = RapFT(public(), max_grad_norm=bound).policy({"w": torch.ones(4)}, multiplier)
    assert (policy.bounds, policy.stds) == ((bound,), (multiplier * bound,))


def test_the_card_of_paper_mode_states_the_flaw_and_the_true_epsilon():
    private = start(
        Classifier(), method=RapFT(mode="paper", source=PrivateSubset(0.5)), noise_multiplier=0.6, target_delta=1e-3
    )
    logical_step(private)
    card = private.card()
    assert card["guarantee"] == "none"
    assert any("computed from private examples without noise" in why for why in card["why_no_guarantee"])
    true = accounting.dpsgd(effective_noise_multiplier(0.6, 0.7), private.sample_rate, 1)
    stated = accounting.dpsgd(0.6, private.sample_rate, 1)
    bound = float(accounting.epsilon(true, 1e-3))
    assert card["epsilon"]["upper_bound"] == pytest.approx(bound)
    assert f"would state epsilon {float(accounting.epsilon(stated, 1e-3)):.4g}" in card["notes"][0]
    assert f"whose epsilon is {bound:.4g}" in card["notes"][0]


def test_paper_mode_with_a_public_mask_has_a_guarantee():
    method = RapFT(public(), mode="paper")
    assert method.flaws() == ()
    private = start(Classifier(), method=method, target_epsilon=4.0, target_delta=1e-3, unsafe_seed=None)
    # The budget is met as printed, so the truth is below it.
    stated = accounting.dpsgd(private.noise_multiplier * math.sqrt(0.7**3 + 0.3**3), private.sample_rate, 6)
    assert float(accounting.epsilon(stated, 1e-3)) == pytest.approx(4.0, rel=1e-3)
    logical_step(private)
    assert private.epsilon() < 3.0


@cases(
    ("settings", "message"),
    [
        ({}, "private data as they are"),
        ({"source": PrivateSubset()}, "private data as they are"),
        ({"mode": "printed"}, "mode is 'printed'"),
        ({"mode": "paper", "allocation": "optimal"}, "not the paper's"),
        ({"allocation": "best"}, "allocation is 'best'"),
        ({"allocation": "axes", "axes_power": 2.0}, "axes_power is 2.0"),
        ({"allocation": "ellipsoid"}, "removed: use allocation='optimal'"),
        ({"source": PublicGradients([{}]), "allocation": "printed"}, "PublicGradients say how large"),
        ({"irrelevance_ratio": 0.5}, "above .5"),
        ({"irrelevance_ratio": 1.2}, "above .5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": math.inf}, "max_grad_norm"),
        ({"map_after": -1}, "map_after"),
        ({"map_after": 1.5}, "map_after is 1.5: give a whole number"),
        ({"map_every": 0}, "map_every"),
        ({"map_every": 2.5}, "map_every is 2.5: give a whole number"),
        ({"source": [{"x": 1}]}, r"source is a list: give PublicMap"),
    ],
)
def test_bad_settings(settings, message):
    needs_source = "source" not in settings and settings not in ({}, {"mode": "paper", "allocation": "optimal"})
    with pytest.raises(ValueError, match=message):
        RapFT(**({"source": public(), **settings} if needs_source else settings))


@cases(
    "options", [(0.0, 0.1), (-1.0, 0.1), (math.inf, 0.1), (1.0, 0.0), (1.0, 1.5), (1.0, 0.1, 0.0), (1.0, 0.1, math.inf)]
)
def test_a_source_needs_noise_and_a_rate_or_public_examples(options):
    with pytest.raises(ValueError, match="noise_multiplier is|sample_rate is|max_norm is"):
        NoisyMap(*options)
    with pytest.raises(ValueError, match="no batches"):
        PublicMap([])


def test_nothing_is_spent_on_a_zero_matrix():
    model = Classifier()
    with torch.no_grad():
        model.second.weight.zero_()
    private = start(model, method=RapFT(NoisyMap(1.0, 0.5)), noise_multiplier=1.0, target_delta=1e-3)
    with pytest.raises(ValueError, match="second.weight is zero throughout"):
        next(iter(private.data_loader))
    assert private.epsilon() == 0


USERS = {"user_ids": [i // 2 for i in range(24)], "max_examples_per_user": 2}


@cases(
    ("method", "options", "message"),
    [
        *((RapFT(NoisyMap(1.0, 0.5), irrelevance_ratio=ratio), {}, "r_s = 0") for ratio in (1.0, 0.999)),
        (RapFT(NoisyMap(0.3, 1.0)), {"target_epsilon": 0.5, "noise_multiplier": None}, "out of reach"),
        (RapFT(public(), map_after=100), {}, "no mask would ever be made"),
        (RapFT(NoisyMap(1.0, 1.0)), USERS, "take it from PublicMap"),
    ],
)
def test_what_no_run_can_keep_is_refused_before_anything_is_spent(method, options, message, tmp_path):
    options = {"noise_multiplier": 1.0, "target_delta": 1e-3, "output_dir": tmp_path, **options}
    with pytest.raises(ValueError, match=message):
        start(Classifier(), loader(batch_size=4), method=method, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_of_a_map_is_in_the_form_that_the_card_names(secure, monkeypatch):
    forms = []

    def drawn(values, std, stream, *, secure_rounding=False):
        forms.append(secure_rounding)
        return values

    monkeypatch.setattr("fastdp.ops.add_noise_", drawn)
    private = start(
        Classifier(), method=RapFT(NoisyMap(1.0, 0.5)), noise_multiplier=1.0, target_delta=1e-3, secure_rounding=secure
    )
    private.prepare()
    assert set(forms) == {secure}
    assert private.card()["noise_source"]["secure_rounding"] is secure


class Bare(Classifier):
    """Returns its logits alone."""

    def forward(self, x):
        return self.logits(x)


class Strict(Classifier):
    """Cannot be called without labels."""

    def forward(self, x, labels):
        return super().forward(x, labels)


class Lossy(Classifier):
    """Keeps its logits to itself."""

    def forward(self, x, labels=None):
        return {"loss": super().forward(x, labels)["loss"]}


@pytest.mark.parametrize("source", [public(), NoisyMap(2.0, 0.5)])
def test_logits_that_are_not_named_and_labels_that_are_required_give_the_same_relevance(source):
    batch = collate(examples(6, 9))
    expected, maps = None, []
    for model in (Classifier(), Bare(), Strict()):
        maps.append(Propagator(model, dict(model.named_parameters())).total(batch))
        criterion = _rows if isinstance(model, Bare) else None
        private = start(model, method=RapFT(source), criterion=criterion, noise_multiplier=1.0, target_delta=1e-3)
        next(iter(private.data_loader))
        expected = private.outcome if expected is None else expected
        assert all(torch.equal(private.outcome[name], expected[name]) for name in expected)
    assert all(torch.equal(maps[0][name], other[name]) for other in maps[1:] for name in maps[0])


def _rows(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("source", [public(), NoisyMap(2.0, 0.5)])
def test_a_model_without_logits_or_loss_is_refused_when_it_is_made_private(source, after):
    with pytest.raises(ValueError, match=r"let forward\(\) return 'logits'"):
        start(Lossy(), method=RapFT(source, map_after=after), noise_multiplier=1.0, target_delta=1e-3)
    method = RapFT(PublicGradients(public().batches), allocation="axes", map_after=after)
    with pytest.raises(ValueError, match="the model returned no loss"):
        start(Bare(), method=method, criterion=_rows, noise_multiplier=1.0, target_delta=1e-3)
