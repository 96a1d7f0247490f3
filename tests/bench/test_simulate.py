"""Simulated steps: what is counted is what a real step does, and a host that waits is found."""

import dataclasses
import warnings

import pytest
import torch
import torch.utils._device as torch_device
from fastdp.bench import simulate, workloads
from fastdp.bench.meter import GPUS, META, HostWaits, simulated
from fastdp.bench.simulate import CASES
from fastdp.bench.workloads import Case

import fastdp

pytest.importorskip("triton")
#: Small enough to be run for real, on a processor; without GQA and dropout, which it computes in another way.
SMALL = {"layers": 6, "width": 64, "feed_forward": 128, "heads": 4, "key_heads": 4, "vocabulary": 256, "rows": 4}


def small(kind, **changes):
    return Case(kind, **(SMALL | {"tokens": 128, "dropout": 0.0, "dtype": torch.float32} | changes))


@pytest.mark.parametrize(
    ("case", "private"),
    [
        pytest.param(small("gpt2"), False, id="plain gpt2-full"),
        pytest.param(small("gpt2"), True, id="private gpt2-full", marks=pytest.mark.slow),
        pytest.param(small("llama", rank=4), True, id="private llama-lora", marks=pytest.mark.slow),
        pytest.param(small("llama", rank=4, four_bits=True), True, id="private llama-qlora"),
    ],
)
def test_memory_is_that_of_a_real_step(case, private):
    """Within 3%: a processor's kernels hold scratch of their own."""
    gpu = dataclasses.replace(GPUS["h100"], memory=0)
    found = simulate.tally(case, gpu, private=private, granularity=1)
    real = simulate.real_peak(case, private=private)
    assert found.peak_bytes - found.start_bytes == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            small("llama", layers=3, tokens=64, vocabulary=2048, rank=4, checkpointed=True),
            id="llama-lora-checkpointed",
        ),
        pytest.param(small("llama", layers=3, tokens=64), id="llama-full", marks=pytest.mark.slow),
        pytest.param(small("gpt2", layers=4, vocabulary=8192), id="gpt2-full", marks=pytest.mark.slow),
    ],
)
def test_the_first_step_needs_no_more_memory_than_a_step(case):
    """Whose model is traced, whose rows are run beside others, and whose norms and sums are compared with autograd's."""
    gpu = dataclasses.replace(GPUS["h100"], memory=1 << 26 if case.checkpointed else 0)
    plain = simulate.tally(case, gpu, private=False, granularity=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "this model takes the one-example route")
        first = simulate.first_peak(case, gpu, private=True, granularity=1)
    assert first <= 1.05 * plain.peak_bytes


def test_a_checkpointed_step_is_simulated_with_one_backward_pass_and_with_two():
    """By default as many as the device's memory allows."""
    case = small("llama", layers=3, checkpointed=True)
    plain, one, two = (
        simulate.tally(case, GPUS["h100"], private=private, two_pass=two)
        for private, two in ((False, None), (True, None), (True, True))
    )
    assert (one.backward_passes, two.backward_passes) == (1, 2)
    assert plain.operations < one.operations < two.operations
    # The first micro-batch runs twice, and later ones in parts: nothing waits in either.
    short = dataclasses.replace(GPUS["h100"], memory=plain.peak_bytes)
    parts = simulate.tally(case, short, private=True)
    assert parts.backward_passes == 2
    assert parts.launches > 1.5 * one.launches
    assert parts.operations < two.operations


def test_a_draw_is_simulated_in_microbatches_of_one_size(monkeypatch):
    """Plain steps add up as many rows as are expected; private ones come to a few more, of weight 0."""
    monkeypatch.setattr(simulate, "_DRAWS", 6)
    case = small("gpt2", layers=1, tokens=64, logical=16, batches=8)
    plain, private, again = (
        simulate.tally(case, GPUS["h100"], private=private, granularity=1) for private in (False, True, True)
    )
    assert plain.microbatches == 4
    assert 4 < private.microbatches < 5.5
    assert (private.launches, private.operations) == (again.launches, again.operations)
    one = simulate.tally(dataclasses.replace(case, logical=0), GPUS["h100"], private=True, granularity=1)
    assert private.operations == pytest.approx(private.microbatches * one.operations, rel=0.1)


def test_four_bits_make_a_weight_of_sixteen_values_a_block():
    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 6, bias=False)
    packed, x = workloads.FourBitLinear(plain), torch.randn(3, 128, requires_grad=True)
    assert packed.weight.nbytes == plain.weight.numel() // 2
    made = packed(x)
    (gradient,) = torch.autograd.grad(made.sum(), x)
    weight = packed(torch.eye(128)).T.detach()
    assert torch.allclose(made, x @ weight.T, atol=1e-5)
    assert torch.allclose(gradient, weight.sum(0).expand(3, -1), atol=1e-5)
    steps = plain.weight.detach().view(-1, 64).abs().amax(1) / 7.5
    assert bool(((weight - plain.weight).reshape(-1, 64).abs() <= 0.501 * steps.unsqueeze(1)).all())


@pytest.mark.parametrize(
    ("name", "changes", "seconds", "memory"),
    [
        # With fewer layers the head has a larger share, which privacy costs no more.
        ("llama-1b-full-checkpointed", {"layers": 3}, 1.25, 1.05),
        *(
            pytest.param(name, {}, seconds, memory, marks=pytest.mark.slow)
            for name, seconds, memory in (
                ("llama-1b-full-checkpointed", 1.25, 1.05),
                ("llama-1b-full-checkpointed-16x2048", 1.30, 1.05),
                ("llama-1b-lora-checkpointed-12x512", 1.02, 1.05),
                ("llama-8b-lora-checkpointed-16x2048", 1.02, 1.05),
                ("llama-1b-long-2", 1.18, 0.9),
                ("gemma3-1b-full", 1.15, 0.7),  # with all logits in memory it was 1.13
            )
        ),
    ],
)
def test_steps_of_large_models_keep_to_their_bounds(name, changes, seconds, memory):
    case = dataclasses.replace(CASES[name], **changes)
    plain, private = (simulate.tally(case, GPUS["h100"], private=private) for private in (False, True))
    assert private.seconds <= seconds * plain.seconds
    assert private.peak_bytes <= memory * plain.peak_bytes
    assert private.backward_passes == 1


def test_a_host_that_waits_is_found():
    with simulated(GPUS["h100"]) as meter:
        x = torch.ones(3, device="meta")
        namespace = {"__name__": "fastdp.engine.waiting", "torch": torch, "x": x}
        for code in ("float(x.sum())", "x.cpu()", "torch.tensor([1.0], device='meta')", "torch.ones(3).to('meta')"):
            eval(code, namespace)
            with meter.measuring() as found, pytest.raises(HostWaits, match="fastdp.engine.waiting"):
                eval(code, namespace)
            with meter.measuring() as found:
                eval(code, namespace | {"__name__": "transformers.model"})
            assert found.model_waits == 1
        with meter.measuring() as found:
            eval("torch.ones(3).to('meta', non_blocking=True)", namespace)
        assert found.launches == 1


def test_no_host_waits_in_a_later_step():
    """The third step is measured elsewhere."""
    with simulated(GPUS["h100"]) as meter:
        step = simulate.step_of(small("llama", layers=1, tokens=16, rank=4), META, private=True)
        for _ in range(3):
            step()
        with meter.measuring() as found:
            step()
    assert found.launches > 0


class Biased(torch.nn.Module):
    """A linear layer whose weight is a choice of a table's rows by a buffer, as Swin's position biases are."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(9, 16))
        self.register_buffer("index", torch.zeros(2, 4, dtype=torch.int64))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(x @ self.table[self.index.view(-1)].T, labels)}


def test_no_host_waits_for_what_a_buffer_chooses():
    rows = [{"x": torch.ones(16), "labels": torch.tensor(0)}] * 8
    with simulated(GPUS["h100"]) as meter:
        model = Biased().to(META)
        options = {
            "noise_multiplier": 1.0,
            "target_delta": 1e-5,
            "epochs": 9,
            "self_check": False,
            "sampling": "shuffled",
        }
        optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(rows, batch_size=8)
        private = fastdp.make_private(model, optimizer, loader, capture=False, **options)

        def step():
            for batch in private.data_loader:
                model(**{k: t.to(META, non_blocking=True) for k, t in batch.items()})["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()

        step()
        step()
        with meter.measuring() as found:
            step()
        private.detach()
    assert found.launches > 0


def test_prices():
    gpu = dataclasses.replace(GPUS["h100"], bandwidth=1e9, half=1e12, launch=1e-6, captured_launch=1e-7)
    with simulated(gpu) as meter:
        a, b = (torch.empty(1024, 1024, device="meta", dtype=torch.bfloat16) for _ in range(2))
        with meter.measuring() as product:
            made = a @ b
        with meter.measuring() as tiny:
            torch.zeros(1, device="meta")
        with meter.measuring() as views:
            a.view(-1).expand(2, -1).t()
        start = meter.live
        del made
        assert start - meter.live == 2 << 20
    assert (product.launches, product.operations, product.bytes) == (1, 2 * 1024**3, 3 * 2 << 20)
    assert product.seconds == pytest.approx(6e-3, rel=0.05)
    assert (tiny.seconds, tiny.captured_seconds) == (1e-6, 1e-7)
    assert (views.launches, views.bytes) == (0, 0)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama-8b-lora", 1.04),
        ("bert-base-full", 1.07),
        pytest.param("llama-1b-full", 1.1, marks=pytest.mark.slow),
        pytest.param("gpt2-124m-full", 1.25, marks=pytest.mark.slow),
    ],
)
def test_a_layer_launches_little_more_than_without_privacy(name, most):
    """By the difference of two depths; that it runs at all says that nothing of ours makes the host wait."""
    counts = {}
    for private in (False, True):
        shallow, deep = (
            simulate.tally(dataclasses.replace(CASES[name], layers=layers), GPUS["h100"], private=private)
            for layers in (1, 2)
        )
        counts[private] = deep.launches - shallow.launches
    assert 0 < counts[True] <= most * counts[False]


def test_a_context_of_a_device_reaches_what_torch_makes_of_numbers_afterwards():
    """Torch keeps the list of functions that such a context reaches: made within, it would hold the meter's own for good."""
    torch_device._device_constructors.cache_clear()
    with simulated(GPUS["h100"]), torch.device("cpu"):
        torch.empty(0)
    with META:
        assert torch.tensor([1.0]).is_meta
