"""DP-ZO: the slopes are those of the definition, one example moves the sum by the bound, and the noise is on one number.

The statistical test fails by chance in one run in 10^9.
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from scipy import stats
from transformers import GPT2Config, GPT2LMHeadModel

import fastdp
from fastdp.data import Collator
from tests.engine.models import batch, build
from tests.engine.runs import Classifier, collate, examples, join, loader, same, start, state

RATE = 0.5


def run(model, data=None, method=None, **options):
    if not options.keys() & {"shapes", "isolation"}:
        options["isolation"] = "per_example"
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=RATE)
    return start(model, data, optimizer, method=method or fastdp.DPZO(max_slope=0.5), **options)


def one_step(private):
    """One logical batch: the released number, and the micro-batches."""
    seen = []
    for rows in private.data_loader:
        seen.append(rows)
        output = private.model(**rows)
        (output["loss"] if isinstance(output, dict) else output.loss).backward()
        private.optimizer.step()
        if private.last_step_done:
            break
    released = float(private.installed.step.weight.grad)
    private.optimizer.zero_grad()
    return released, seen


def direction(private):
    return {name: private.installed.draw(p) for name, p in private.installed.trained.items()}


def slopes(model, rows, z, h=1e-3):
    """By the definition: each row alone, two copies of the weights, in float64."""
    found = []
    for row in range(len(next(iter(rows.values())))):
        one = {name: value[row : row + 1] for name, value in rows.items()}
        one = {name: v.double() if v.is_floating_point() else v for name, v in one.items()}
        losses = []
        for sign in (1, -1):
            moved = copy.deepcopy(model).double().eval()
            with torch.no_grad():
                for name, p in moved.named_parameters():
                    p.add_(z[name].double(), alpha=sign * h)
                output = moved(**one)
            losses.append(output["loss"] if isinstance(output, dict) else output.loss)
        found.append(float(losses[0] - losses[1]) / (2 * h))
    return torch.tensor(found)


@pytest.mark.parametrize("name", ["classifier", "bert", "gpt2", "gpt2 in parts"])
def test_a_step_is_that_of_the_definition(name, monkeypatch):
    model = Classifier() if name == "classifier" else build(name.split()[0])
    data = loader()
    if name != "classifier":
        whole = batch(name.split()[0], rows=12)
        rows = [{key: value[at] for key, value in whole.items()} for at in range(12)]
        data = torch.utils.data.DataLoader(rows, batch_size=6)
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    most = 2 if name.endswith("parts") else None
    # Padding would stand among the rows that are seen.
    monkeypatch.setattr(fastdp.DPZO, "needs_public_shapes", False)
    private = run(model.train(), data, max_physical_batch_size=most, isolation=None)
    z = direction(private)
    released, seen = one_step(private)
    assert private.route == "uses"
    truth = slopes(plain, join(seen), z)
    assert bool((truth.abs() > 0.5).any())
    expected = float(truth.clamp(-0.5, 0.5).sum()) / private.expected_batch_size
    assert released == pytest.approx(expected, abs=2e-3)
    assert list(model.state_dict()) == keys
    for key, p in plain.named_parameters():
        torch.testing.assert_close(model.state_dict()[key], p - RATE * released * z[key])
    assert not all(torch.equal(z[key], own) for key, own in direction(private).items())
    private.detach()
    assert "forward" not in model.__dict__
    assert all(p.requires_grad for p in model.parameters())
    assert len(private.optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 1e4, math.inf]), bound=st.sampled_from([1e-3, 0.5]))
def test_one_example_moves_the_sum_by_the_bound_at_most(seed, scale, bound):
    data = examples(4, seed)
    data[3]["x"] = data[3]["x"] * scale
    sums = []
    for rows in (data, data[:3]):
        method = fastdp.DPZO(max_slope=bound, seed=seed)
        model = Classifier(seed)
        private = run(model, loader(rows, len(rows)), method, epochs=1)
        released, seen = one_step(private)
        assert sum(len(own["x"]) for own in seen) == len(rows)
        sums.append(released * len(rows))
        private.detach()
    # Slopes of other shapes round otherwise by some 1e-7 of the loss over 2 h.
    assert abs(sums[0] - sums[1]) <= bound * (1 + 1e-5) + 3e-3


def test_noise_is_on_one_number_and_of_the_standard_deviation_that_is_paid_for():
    """Slopes are clipped to nearly nothing, so that what is released is noise."""
    model = Classifier()
    options = {"noise_multiplier": 200.0, "target_delta": 1e-3, "epochs": 25, "unsafe_seed": None, "shapes": "public"}
    private = run(
        model, method=fastdp.DPZO(max_slope=1e-3), optimizer=torch.optim.SGD(model.parameters(), 0.0), **options
    )
    draws = []
    while len(draws) < 75:
        for rows in private.data_loader:
            model(**rows)["loss"].backward()
            private.optimizer.step()
            draws.append(float(private.installed.step.weight.grad))
            private.optimizer.zero_grad()
    noise = torch.tensor(draws) * private.expected_batch_size / (200.0 * 1e-3)
    # Each is N(0, 1) but for a mean of at most the batch over the noise; the sum of squares is chi-square.
    centred = noise - noise.mean()
    square = float(centred.square().sum())
    assert 2 * min(stats.chi2.cdf(square, len(draws) - 1), stats.chi2.sf(square, len(draws) - 1)) > 1e-9


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_reduction": "mean"}, "leave criterion"),
        ({"criterion": lambda output, rows: F.cross_entropy(output["logits"], rows["labels"])}, "leave criterion"),
    ],
)
def test_refusals_leave_the_model_as_it_was(options, reason):
    model = Classifier()
    before = state(model)
    with pytest.raises(ValueError, match=reason):
        run(model, **options)
    assert "forward" not in model.__dict__
    assert same(state(model), before)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match="smoothing"):
        fastdp.DPZO(smoothing=0.0)


def test_a_loop_that_unfreezes_or_writes_weights_which_releases_move_is_refused():
    private = run(Classifier())
    one_step(private)
    private.model.first.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"first.weight is moved along a direction.* 1 of 6 releases are spent"):
        one_step(private)
    private.model.first.weight.requires_grad_(False)
    one_step(private)
    with torch.no_grad():
        private.model.first.weight.add_(private.data_loader.dataset[0]["x"].mean())
    with pytest.raises(RuntimeError, match="first.weight was changed outside of a release"):
        one_step(private)
    assert private.steps_done == 2


def released_of_texts(longer, shapes):
    """The sum of 31 equal texts and of one that is longer, in bounds, under bfloat16 autocast."""
    generator = torch.Generator().manual_seed(2)
    text, other = (torch.randint(1, 1000, (size,), generator=generator).tolist() for size in (23, 23 + longer))
    config = GPT2Config(
        n_layer=6, n_embd=128, n_head=4, vocab_size=1000, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    for name, p in model.named_parameters():
        p.requires_grad_("ln_f" in name)
    rows = [{"input_ids": ids, "labels": ids} for ids in (*[text] * 31, other)]
    data = torch.utils.data.DataLoader(rows, batch_size=32, collate_fn=Collator(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    method = fastdp.DPZO(max_slope=0.1)
    private = run(model, data, method, optimizer=torch.optim.SGD(trained, 0.0), epochs=1, shapes=shapes)
    for batch_of_rows in private.data_loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch_of_rows).loss
        loss.backward()
        private.optimizer.step()
    released = float(private.installed.step.weight.grad) * 32 / 0.1
    private.detach()
    return released


def test_one_text_would_move_the_others_by_its_shape_so_shapes_are_public(monkeypatch):
    """The text itself moves the sum by two bounds at most."""
    with pytest.raises(ValueError, match="DP-ZO.*shapes=.public.*isolation"):
        released_of_texts(0, None)
    assert abs(released_of_texts(77, "public") - released_of_texts(0, "public")) <= 2
    monkeypatch.setattr(fastdp.DPZO, "needs_public_shapes", False)
    assert abs(released_of_texts(77, None) - released_of_texts(0, None)) > 4


class Own(Classifier):
    """A loss that no function of torch's makes."""

    def forward(self, x, labels=None):
        chosen = self.logits(x).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        return {"loss": -chosen.mean()}


class Coupled(Classifier):
    """Whose logits depend on the others of a batch."""

    def logits(self, x):
        return super().logits(x - x.mean(0))


def test_a_model_that_couples_examples_is_run_one_by_one():
    model = Coupled()
    private = run(model)
    z = direction(private)
    released, seen = one_step(private)
    assert private.route == "one-example"
    rows = join(seen)
    # Alone, a row's own mean leaves it inputs of 0.
    truth = slopes(Classifier(), {**rows, "x": torch.zeros_like(rows["x"])}, z)
    assert released == pytest.approx(float(truth.clamp(-0.5, 0.5).sum()) / private.expected_batch_size, abs=2e-3)


class Elsewhere(Classifier):
    """Reads a weight where no forward of its module runs."""

    def logits(self, x):
        return self.second(torch.tanh(F.linear(x, self.first.weight, self.first.bias)))


def test_a_loss_of_the_models_own_is_taken_row_by_row():
    released = [one_step(run(model))[0] for model in (Classifier(), Own())]
    assert released[0] == pytest.approx(released[1], abs=2e-3)
    with pytest.raises(ValueError, match="first.weight is read outside the forward"):
        one_step(run(Elsewhere()))


def test_a_model_loaded_in_evaluation_mode_trains_and_evaluates_as_its_own():
    model, rows = Classifier().eval(), collate(examples(4))
    plain = copy.deepcopy(model)(**rows)["loss"]
    private = run(model, shapes="public")
    with torch.no_grad():
        assert torch.equal(model.eval()(**rows)["loss"], plain)
    one_step(private)
    assert private.route == "uses"
