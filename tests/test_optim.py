"""Fused updates of parameters of any precision: torch's AdamW, on noised sums."""

import copy

import pytest
import torch

import fastdp
from fastdp.private.release import ClippedSums
from tests.cases import cases, pairs
from tests.engine.runs import PRIVATE, Classifier, same, start, state

NUMBERS = {"divisor": 4.0, "secure_rounding": False}


def made(dtype, **options):
    """An optimizer of two groups of parameters, and how it is driven without a run."""
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 5), (7,), (2, 2))]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    return params, fastdp.optim.AdamW(groups, lr=0.01, **options)


def update(optimizer, params, sums, std=0.0, release=0):
    taken = []

    def take(tensors):
        taken.append(list(tensors))
        return fastdp.NoiseStream.unsafe_reproducible(1).take_at(release, tensors)

    count = len(params)
    summed = ClippedSums(params, sums, [std] * count, range(count), [None] * count)
    return optimizer.noisy_update()(summed, take, **NUMBERS), taken


@cases(*pairs(("master", [False, True]), ("dtype", [torch.float32, torch.bfloat16])))
def test_a_fused_update_is_that_of_a_float32_adamw(dtype, master):
    params, optimizer = made(dtype, master_weights=master)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    theirs = torch.optim.AdamW([{"params": wide[:2]}, {"params": wide[2:], "weight_decay": 0.0}], lr=0.01)
    for _ in range(5):
        sums = [torch.randn(p.shape) for p in params]
        left, taken = update(optimizer, params, [s.clone() for s in sums])
        assert not left
        assert taken == [[0, 1], [2]]  # one call for each group of parameters
        for w, total in zip(wide, sums):
            w.grad = total / 4
        theirs.step()
        if dtype != torch.float32 and not master:
            for w, p in zip(wide, params):
                torch.testing.assert_close(p, w.detach().to(dtype), rtol=2**-7, atol=1e-6)
                w.data.copy_(p)  # what rounding lost stays lost
    for w, p in zip(wide, params):
        torch.testing.assert_close(p, w.detach().to(dtype), rtol=2**-7 if dtype != torch.float32 else 1e-6, atol=1e-6)
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
    assert all(("master" in optimizer.state[p]) == (master and dtype != torch.float32) for p in params)


@pytest.mark.parametrize("master", [False, True])
def test_a_step_on_gradients_goes_on_from_fused_moments(master, monkeypatch):
    """Another hook beside ours asks for gradients: the same arithmetic, one parameter after another."""
    monkeypatch.setattr(fastdp.optim, "drives", lambda optimizer: True)
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        params, optimizer = made(torch.bfloat16, master_weights=master)
        for turn in range(3):
            sums = [torch.randn(p.shape, generator=torch.Generator().manual_seed(turn)) for p in params]
            if turn == 1 and not fused:
                for p, total in zip(params, sums):
                    p.grad = (total / 4).to(p.dtype)
                optimizer.step()
                optimizer.zero_grad()
            else:
                update(optimizer, params, sums)
        results.append([p.detach().float() for p in params])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3)


@cases("resumed_with", [True, False])
def test_masters_of_some_parameters_of_a_group_serve_these_alone(resumed_with):
    """Norms are often left in float32 beside matrices in half precision; a state that has masters goes on with them."""
    params = [torch.nn.Parameter(torch.randn(3, 5).bfloat16()), torch.nn.Parameter(torch.randn(7))]
    optimizer = fastdp.optim.AdamW(params, lr=0.01, master_weights=True)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    theirs = torch.optim.AdamW(wide, lr=0.01)
    for turn in range(3):
        if turn == 1:
            state, optimizer = optimizer.state_dict(), fastdp.optim.AdamW(params, lr=0.01, master_weights=resumed_with)
            optimizer.load_state_dict(state)
        sums = [torch.randn(p.shape) for p in params]
        left, _ = update(optimizer, params, [s.clone() for s in sums])
        assert not left
        for w, total in zip(wide, sums):
            w.grad = total / 4
        theirs.step()
    for w, p in zip(wide, params):
        torch.testing.assert_close(
            p, w.detach().to(p.dtype), rtol=2**-7 if p.dtype != torch.float32 else 1e-6, atol=1e-6
        )
        state = optimizer.state[p]
        assert ("master" in state) == (p.dtype != torch.float32)
        assert {state[name].dtype for name in state if name != "step"} == {torch.float32}
        assert int(state["step"]) == 3


def test_counts_of_steps_may_be_whole_numbers():
    params, optimizer = made(torch.float32)
    for _ in range(2):
        update(optimizer, params, [torch.randn(p.shape) for p in params])
        for own in optimizer.state.values():
            own["step"] = own["step"].long()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 2, 2]


@pytest.mark.parametrize(*pairs(("fused", [True, False]), ("dtype", [torch.float32, torch.bfloat16])))
def test_moments_in_half_precision_follow_those_in_float32(dtype, fused, monkeypatch):
    """Over steps whose gradients shrink: to nearest, the second moment would stay at its height."""
    monkeypatch.setattr(fastdp.optim, "drives", lambda optimizer: True)
    found = []
    for moments in (torch.float32, torch.bfloat16):
        param = torch.nn.Parameter(torch.zeros(4096, dtype=dtype))
        optimizer = fastdp.optim.AdamW([param], lr=1e-3, moments=moments, betas=(0.9, 0.995))
        for turn in range(120):
            total = torch.full(param.shape, 4.0 if turn < 20 else 0.4)
            if fused:
                assert not update(optimizer, [param], [total], release=turn)[0]
            else:
                param.grad = (total / 4).to(dtype)
                optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == moments
        found.append([state[name].float().mean() for name in ("exp_avg", "exp_avg_sq")])
    torch.testing.assert_close(found[0], found[1], rtol=0.004, atol=0)


def test_moments_of_another_dtype_are_refused():
    with pytest.raises(ValueError, match=r"keep them in torch.float32 or in torch.bfloat16"):
        made(torch.float32, moments=torch.float16)


@cases("option", ["amsgrad", "maximize"])
def test_an_option_that_a_step_in_float32_lacks_is_refused(option, monkeypatch):
    """Torch's own step would keep moments in half precision, so these parameters do not get it."""
    monkeypatch.setattr(fastdp.optim, "drives", lambda optimizer: True)
    for dtype, moments in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        with pytest.raises(ValueError, match=option):
            made(dtype, moments=moments, **{option: True})
    made(torch.float32, **{option: True})
    params, optimizer = made(torch.bfloat16)
    optimizer.param_groups[0][option] = True
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(ValueError, match=option):
        optimizer.step()


def chained(model):
    """Two optimizers, of matrices and of the rest."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wide] for wide in (True, False))
    return getattr(torch.optim, "Muon", torch.optim.SGD)(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


def test_optimizers_in_a_chain_step_as_they_would_alone():
    one, two = Classifier(), Classifier()
    chain, alone = fastdp.optim.ChainedOptimizer(*chained(one)), chained(two)
    for step in range(4):
        for model in (one, two):
            for number, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * step + number))
        chain.step()
        for optimizer in alone:
            optimizer.step()
        if step == 1:
            # As a checkpoint does.
            again = fastdp.optim.ChainedOptimizer(*chained(one))
            again.load_state_dict(copy.deepcopy(chain.state_dict()))
            chain = again
    assert same(state(one), state(two))


@cases("inner", [False, True])
def test_a_chain_is_private_and_its_schedules_follow_releases(inner):
    model = Classifier()
    chain = fastdp.optim.ChainedOptimizer(*chained(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(chain.optimizers[1] if inner else chain, 0.5)
    private = start(model, optimizer=chain, max_physical_batch_size=3, epochs=1, **PRIVATE)
    before = state(model)
    for batch in private.data_loader:
        model(**batch)["loss"].backward()
        chain.step()
        schedule.step()
        chain.zero_grad()
    assert chain.param_groups[1]["lr"] == pytest.approx(0.01 * 0.5**private.steps_done)
    assert all(not torch.equal(before[name], value) for name, value in state(model).items())


def test_a_chain_refuses_what_its_optimizers_would_be_refused_for():
    model = Classifier()
    first, second = model.first.parameters(), model.second.parameters()
    chain = fastdp.optim.ChainedOptimizer(torch.optim.SGD(first, lr=0.1), torch.optim.LBFGS(second))
    with pytest.raises(ValueError, match="LBFGS"):
        start(model, optimizer=chain, **PRIVATE)
