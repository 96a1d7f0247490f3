"""What every op asks of its tensors: types, devices, signs, and memory of their own where they are written."""

import copy

import pytest
import torch

from fastdp import ops
from fastdp.ops.table import ON_HOST, OPS
from tests.cases import cases
from tests.ops.uses import offsets_of, stream

TOKENS, UNITS, ROWS, COLUMNS = 6, 2, 5, 4
OFFSETS = offsets_of((2, 4))
MASK = torch.rand(ROWS, COLUMNS) > 0.5
STEP = {"divisor": 1.0, "lr": 0.1, "step": 1}


def left() -> torch.Tensor:
    return torch.randn(TOKENS, ROWS)


def right() -> torch.Tensor:
    return torch.randn(TOKENS, COLUMNS)


def numbers(secure: bool) -> tuple:
    return 0.5, 1.0, 0.1, 0.9, 0.999, 1e-8, 0.0, 1, secure


def moments() -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(4)]


def arguments() -> dict[str, tuple]:
    """Good arguments of every op."""
    position = stream().take()
    x, weights, ids = torch.randn(3, ROWS, COLUMNS), torch.rand(UNITS), torch.tensor([1, 0, 4, 4, 2, 1])
    table, token = torch.randn(7, 16), torch.tensor([3, 1])
    eta = torch.ones(2, dtype=torch.float64)
    two = [left(), left()], [right(), right()]
    return {
        "norms": (left(), right(), OFFSETS, 2, MASK),
        "cross_inner": (ids, right(), left(), right(), OFFSETS, OFFSETS),
        "row_products": (left(), right(), OFFSETS, 2),
        "gram_norms": (*two, [1, 1], OFFSETS, 1 << 20),
        "token_counts": (*two, OFFSETS),
        "direct_norms": (*two, OFFSETS, [1]),
        "chosen_sqnorm": (*two, OFFSETS, torch.ones(2, UNITS, dtype=torch.bool)),
        "per_unit": (left(), right(), OFFSETS),
        "per_unit_group": (*two, OFFSETS),
        "affine_sums_group": ([right()], [right()], [torch.randn(TOKENS)], [torch.rand(TOKENS)], OFFSETS),
        "weighted_sum_": (torch.zeros(ROWS, COLUMNS), left(), right(), weights, weights.clone(), MASK, OFFSETS),
        "weighted_sum_group_": ([torch.zeros(ROWS, COLUMNS) for _ in range(2)], *two, torch.rand(2, UNITS), OFFSETS)
        + ([True, True],),
        "instance_norms": (x, 2, MASK),
        "instance_sum": (x, torch.rand(3), torch.rand(3), MASK),
        "instance_norms_group": ([x, x],),
        "instance_sum_group": ([x, x], torch.rand(2, 3)),
        "cross_entropy_gradient_": (torch.randn(3, 16), torch.tensor([3, -100, 1]), torch.rand(3), -100, 13),
        "add_noise_": (torch.zeros(3), 0.5, position, False, 0),
        "add_noise_group_": (
            [torch.zeros(3), torch.zeros(2, 2)],
            [0.5, 1.0],
            stream().take_at(0, [0, 1]),
            False,
            [0, 0],
        ),
        "clip_noise": (torch.randn(3, 70), 0.5, 0.5, position, False),
        "clip_noise_backward": (torch.randn(3, 70), torch.randn(3, 70), torch.ones(3, dtype=torch.float64), 0.5),
        "adamw_noise_steps_": (*[[y] for y in moments()], [], stream().take_at(0, [0]), *numbers(True), [], []),
        "snap": (torch.randn(3, 16), table),
        "private_snap": (token, table, eta, position),
        "dchi_vectors": (eta, 16, position),
        "exponential_choice": (token, table, eta, position, None, torch.zeros(7).double()),
    }


def passed_for(operand, args: tuple):
    """What was passed for an operand, as a sequence."""
    given = args[operand.index]
    return given if operand.is_list else () if given is None else (given,)


def tensors_of(name: str, args: tuple):
    """Index and place in a list (or None) of every tensor argument."""
    for operand in OPS[name].operands:
        for place, x in enumerate(passed_for(operand, args)):
            if isinstance(x, torch.Tensor):
                yield operand, place


def replaced(args: tuple, operand, place: int, value) -> tuple:
    args = list(args)
    args[operand.index] = [*args[operand.index]] if operand.is_list else value
    if operand.is_list:
        args[operand.index][place] = value
    return tuple(args)


def test_every_op_is_here():
    assert set(arguments()) == set(OPS)


@cases("name", OPS)
def test_the_registered_op_is_sound(name):
    torch.library.opcheck(getattr(torch.ops.fastdp, name).default, arguments()[name])


@cases("name", OPS)
def test_an_operand_on_another_device_is_refused(name):
    for operand, place in tensors_of(name, arguments()[name]):
        args = arguments()[name]
        bad = replaced(args, operand, place, passed_for(operand, args)[place].to("meta"))
        beside = [o for o, _ in tensors_of(name, args) if o.name in ON_HOST]
        if operand.name in ON_HOST or sum(1 for _ in tensors_of(name, args)) > 1 + len(beside):
            with pytest.raises(ValueError, match="meta"):
                OPS[name](*bad)


@cases("name", OPS)
def test_what_is_no_tensor_is_a_type_error(name):
    good = arguments()[name]
    for operand, place in tensors_of(name, good):
        for value in (None, [1.0]):
            if not (value is None and operand.is_optional):
                with pytest.raises(TypeError):
                    OPS[name](*replaced(good, operand, place, value))
        if operand.is_list:
            with pytest.raises(TypeError, match="must be a list of tensors"):
                OPS[name](*(good[: operand.index] + (None,) + good[operand.index + 1 :]))


#: What is no operand of these, by its dtype: numbers of a law are converted.
CONVERTED = {("exponential_choice", "scale"), ("private_snap", "eta")}
#: Operands of any number of rows, which belong to no other operand's.
ALONE = {
    *(("instance_norms", "instances"), ("add_noise_", "x"), ("add_noise_group_", "xs"), ("clip_noise", "x")),
    *(("snap", "x"), ("snap", "table"), ("private_snap", "table"), ("dchi_vectors", "eta")),
}
#: Operands of any number of dimensions.
ANY_SHAPE = {
    *(("instance_norms_group", "instances"), ("add_noise_", "x"), ("add_noise_group_", "xs"), ("clip_noise", "x")),
    *(("affine_sums_group", "means"), ("affine_sums_group", "rstds")),
}
OTHER_DTYPE = {torch.bool: torch.int64, torch.int64: torch.int32, torch.int32: torch.float32}


def wrong(name: str, operand, x: torch.Tensor):
    """Tensors that an operand may not be, each near to one that it may be."""
    place = (name, operand.name)
    if place not in CONVERTED:
        yield x.to(OTHER_DTYPE.get(x.dtype, torch.int32))
    if place not in ALONE:
        yield x[:-1]
    if place not in ANY_SHAPE:
        yield x[None]
    if operand.name in ON_HOST - {"position", "drawn"}:
        yield x + 1
        yield torch.cat([x[:1], x[1:].flip(0)])


@cases("name", OPS)
def test_an_operand_of_another_dtype_or_shape_is_refused_by_name(name):
    names = ["position", *(operand.name.rstrip("s12") for operand in OPS[name].operands)]
    for operand, place in tensors_of(name, arguments()[name]):
        for bad in wrong(name, operand, passed_for(operand, arguments()[name])[place]):
            with pytest.raises((TypeError, ValueError, IndexError)) as refused:
                OPS[name](*replaced(arguments()[name], operand, place, bad))
            assert any(word in str(refused.value) for word in names), (operand, bad.dtype, bad.shape)


@cases("name", OPS)
def test_negative_views_are_read_with_their_sign(name):
    for operand, place in tensors_of(name, arguments()[name]):
        torch.manual_seed(1)
        args = arguments()[name]
        x = passed_for(operand, args)[place]
        if x.dtype not in (torch.float32, torch.float64):
            continue
        negative = torch._neg_view(-x)
        assert negative.is_neg()
        if operand.is_written:
            with pytest.raises(ValueError, match="negated view"):
                OPS[name](*replaced(args, operand, place, negative))
            continue
        expected, got = copy.deepcopy(args), replaced(copy.deepcopy(args), operand, place, negative)
        results = [OPS[name](*expected), OPS[name](*got)]
        torch.testing.assert_close(results[1], results[0])
        for written in (o.index for o in OPS[name].operands if o.is_written):
            torch.testing.assert_close(got[written], expected[written])


@cases("name", [name for name, op in OPS.items() if op.writes])
def test_written_tensors_have_memory_of_their_own(name):
    args = arguments()[name]
    written = [o for o in OPS[name].operands if o.is_written and len(passed_for(o, args))]
    for operand in written:
        x = passed_for(operand, args)[0]
        with pytest.raises(RuntimeError, match="requires grad"):
            OPS[name](*replaced(args, operand, 0, x.clone().requires_grad_()))
        thin = torch.zeros(1, dtype=x.dtype).expand(x.shape)
        with pytest.raises(ValueError, match="share memory|contiguous"):
            OPS[name](*replaced(args, operand, 0, thin))
        for other in OPS[name].operands:
            own = passed_for(other, args)
            if other is not operand and len(own) and own[0].shape == x.shape and own[0].dtype == x.dtype:
                with pytest.raises(ValueError, match="share memory"):
                    OPS[name](*replaced(args, other, 0, x))


def test_overlaps_of_a_part():
    room = torch.zeros(40)
    with pytest.raises(ValueError, match="out and right share memory"):
        ops.weighted_sum(left(), room[16:].view(6, 4), torch.ones(6), out=room[:20].view(5, 4))
    with pytest.raises(ValueError, match="elements of x may share memory"):
        ops.add_noise_(torch.zeros(9).unfold(0, 3, 1), 1.0, stream())
    sums = [torch.zeros(ROWS, COLUMNS)] * 2
    with pytest.raises(ValueError, match="two of outs share memory"):
        ops.weighted_sum_group([left(), left()], [right(), right()], torch.ones(2, UNITS), OFFSETS, sums)
    params = [torch.zeros(3), torch.zeros(3, requires_grad=True)]
    with pytest.raises(RuntimeError, match="params requires grad"):
        ops.adamw_noise_steps_(params, *[[torch.zeros(3), torch.zeros(3)] for _ in range(3)], 0.0,
                               stream().take_at(0, [0, 1]), **STEP)  # fmt: skip
    many = [torch.zeros(3) for _ in range(20)]
    with pytest.raises(ValueError, match="share memory"):
        ops.adamw_noise_steps_(many, many, *[[torch.zeros(3) for _ in many] for _ in range(2)], 0.0,
                               stream().take_at(0, range(20)), **STEP)  # fmt: skip


def test_views_side_by_side_are_no_overlap():
    room = torch.zeros(ROWS, 2 * COLUMNS)
    pair, two = [room[:, :COLUMNS], room[:, COLUMNS:]], ([left(), left()], [right(), right()])
    ops.weighted_sum_group(*two, torch.ones(2, UNITS), OFFSETS, pair)
    for got, own, other in zip(pair, *two):
        torch.testing.assert_close(got, own.T @ other)
    rows = torch.zeros(8)
    ops.adamw_noise_step_(rows[:4], rows[4:].clone(), rows[4:], torch.zeros(4), 1.0, stream(), **STEP)
    x = torch.zeros(4, 3).T
    assert ops.add_noise_(x, 1.0, stream()) is x
    ops.add_noise_(torch.zeros(0).expand(3, 0), 1.0, stream())


def test_public_functions_name_what_is_no_tensor():
    r, off = right(), OFFSETS
    for call, name in (
        (lambda: ops.weighted_sum(None, r, torch.ones(6)), "left"),
        (lambda: ops.masked_weighted_sum(r, r, torch.ones(6), torch.ones(6), None), "mask"),
        (lambda: ops.weighted_sum_group([None], [r], torch.ones(1, 2), off), "left"),
        (lambda: ops.exponential_choice(None, r, 1.0, stream()), "ids"),
        (lambda: ops.private_snap([0], r, 1.0, stream()), "ids"),
        (lambda: ops.sqnorm(r, r, [0, 6]), "offsets"),
        (lambda: ops.gram_norms([None], [r], [1], off), "lefts"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a tensor, got"):
            call()
