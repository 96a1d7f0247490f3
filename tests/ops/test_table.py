"""The table of ops: which implementation a call reaches, and by which way."""

import importlib
import inspect
import sys
import types
import warnings

import pytest
import torch

from fastdp import ops
from fastdp.ops import table
from fastdp.ops.adamw import Numbers
from fastdp.ops.table import OPS, Op
from tests.cases import cases, pairs

calls: list[str] = []


def _check(x: torch.Tensor, factor: float) -> None:
    if factor < 0:
        raise ValueError("factor must be at least 0")


def _reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale by a factor."""
    calls.append("reference")
    return x * factor


def _scaled(name: str, **options) -> Op:
    return Op(
        f"{name}(Tensor x, float factor) -> Tensor",
        reference=_reference,
        fake=lambda x, factor: torch.empty_like(x),
        check=_check,
        **options,
    )


PLAIN = _scaled("test_plain")
SMOOTH = _scaled(
    "test_smooth",
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
    backward=lambda ctx, grad: (grad * ctx.factor, None),
)
for _op in (PLAIN, SMOOTH):
    del OPS[_op.name]  # other tests walk the table


def _cpu(x: torch.Tensor, factor: float) -> torch.Tensor:
    calls.append("cpu")
    return NotImplemented if factor > 100 else x * factor


PLAIN.implement("cpu", _cpu)


@pytest.fixture(autouse=True)
def _forget():
    calls.clear()


def test_the_device_decides():
    assert torch.equal(PLAIN(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert PLAIN(torch.ones(2, device="meta"), 3.0).is_meta
    SMOOTH(torch.ones(2), 3.0)
    assert calls == ["cpu", "reference", "reference"]


def test_the_registered_op_runs_the_same_implementation():
    assert torch.equal(torch.ops.fastdp.test_plain(torch.ones(2), 3.0), torch.full((2,), 3.0))
    assert calls == ["cpu"]


def test_arguments_are_checked_both_ways():
    for call in (PLAIN, torch.ops.fastdp.test_plain):
        with pytest.raises(ValueError, match="factor must be at least 0"):
            call(torch.ones(2), -1.0)
    assert calls == []


def test_eager_calls_pass_by_the_dispatcher_unless_autograd_records():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        SMOOTH(torch.ones(2), 3.0)
        with torch.no_grad():
            SMOOTH(torch.ones(2, requires_grad=True), 3.0)
        assert "fastdp::test_smooth" not in names
        SMOOTH(torch.ones(2, requires_grad=True), 3.0)
    assert names.count("fastdp::test_smooth") == 1


def test_what_an_implementation_does_not_serve_the_definition_does():
    assert PLAIN(torch.ones(2), 101.0).tolist() == [101, 101]
    assert calls == ["cpu", "reference"]


def test_a_kernel_that_does_not_compile_leaves_the_op_to_its_definition_with_one_warning() -> None:
    class OutOfResources(Exception):
        """As Triton's, which is not installed everywhere."""

        __module__ = "triton.runtime.errors"

    def launched(x: torch.Tensor, factor: float) -> torch.Tensor:
        raise OutOfResources("shared memory, Required: 98304, Hardware limit: 65536")

    op = _scaled("test_uncompiled")
    del OPS[op.name]
    op.implement("cpu", launched)
    with pytest.warns(UserWarning, match="test_uncompiled does not compile for this GPU.*Hardware limit: 65536"):
        assert op(torch.ones(2), 3.0).tolist() == [3, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op(torch.ones(2), 3.0).tolist() == [3, 3]


def test_other_faults_of_an_implementation_are_raised() -> None:
    def launched(x: torch.Tensor, factor: float) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    op = _scaled("test_faulty")
    del OPS[op.name]
    op.implement("cpu", launched)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        op(torch.ones(2), 3.0)


def test_an_implementation_by_its_module_is_imported_when_first_called(monkeypatch):
    op = _scaled("test_lazy")
    del OPS[op.name]
    op.in_family("made_up")
    first = op.implementations["cuda"]
    with pytest.raises(ModuleNotFoundError, match="made_up"):
        first(torch.ones(2), 3.0)
    module = types.ModuleType("fastdp.kernels.made_up")
    module.test_lazy = lambda x, factor: x - factor
    monkeypatch.setitem(sys.modules, "fastdp.kernels.made_up", module)
    assert first(torch.ones(2), 3.0).tolist() == [-2, -2]
    assert op.implementations["cuda"] is module.test_lazy
    assert op.on("cuda", torch.ones(2), 3.0).tolist() == [-2, -2]


def test_without_triton_the_definition_runs_on_cuda(monkeypatch):
    op = _scaled("test_no_triton")
    del OPS[op.name]
    op.in_family("noise")
    monkeypatch.delitem(sys.modules, "fastdp.kernels.noise", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert op.on("cuda", torch.ones(2), 3.0).tolist() == [3, 3]
    assert op.implementations["cuda"] is op.reference


def test_definitions_are_what_every_op_runs_when_asked_for():
    factors, offsets = torch.ones(2, 3), torch.tensor([0, 2])
    with table.definitions():
        assert all(op.implementations == {} for op in OPS.values())
        ops.sqnorm(factors, factors, offsets)
    for name, op in OPS.items():
        assert set(op.implementations) == ({"cuda"} if name in FOR_GPUS else {"cpu", "cuda"})


#: On processors these are their definitions.
FOR_GPUS = {"cross_entropy_gradient_"}
#: On GPUs these are their definitions, or other ops one after another.
COMPOSED = {"add_noise_group_", "direct_norms", "instance_norms", "instance_sum"}


@cases(*pairs(("device", ["cpu", "cuda"]), ("name", list(OPS))))
def test_an_op_has_its_arguments_on_every_device(name, device):
    if device == "cuda":
        pytest.importorskip("triton")
    if name in (COMPOSED if device == "cuda" else FOR_GPUS):
        return
    function = OPS[name].implementations["cpu"] if device == "cpu" else None
    if device == "cuda":
        function = getattr(importlib.import_module(f"fastdp.kernels.{OPS[name].family}"), name)
    wanted = [argument.name for argument in getattr(torch.ops.fastdp, name).default._schema.arguments]
    named = list(inspect.signature(function).parameters)
    # Adam's numbers come as one, in the order of the schema.
    told = named[-1] == "rest"
    assert named == ([*wanted[: len(named) - 1], "rest"] if told else wanted)
    firsts = ["firsts"] if name == "adamw_noise_steps_" else []
    assert not told or wanted[len(named) - 1 :] == [*Numbers._fields, "rows", "columns", *firsts]


IDS, TABLE = torch.zeros(2, dtype=torch.int64), torch.eye(3)
DRAWING = {
    "add_noise_": lambda good, draw: ops.add_noise_(torch.zeros(3), 1.0 if good else -1.0, draw),
    "clip_noise": lambda good, draw: ops.clip_noise(torch.zeros(3), 1.0 if good else 0.0, 1.0, draw),
    "adamw_noise_steps_": lambda good, draw: ops.adamw_noise_step_(
        *torch.zeros(4, 3), 1.0, draw, divisor=1.0, lr=0.1 if good else -0.1, step=1
    ),
    "private_snap": lambda good, draw: ops.private_snap(IDS, TABLE, 1.0 if good else 0.0, draw),
    "dchi_vectors": lambda good, draw: ops.dchi_vectors(torch.full((2,), 1.0 if good else 0.0).double(), 3, draw),
    "exponential_choice": lambda good, draw: ops.exponential_choice(IDS, TABLE, 1.0 if good else -1.0, draw),
}


@cases("name", list(DRAWING))
def test_a_refused_call_spends_no_position(name):
    draw = ops.NoiseStream().at(1, 2)
    with pytest.raises(ValueError, match="must be"):
        DRAWING[name](False, draw)
    DRAWING[name](True, draw)
    with pytest.raises(RuntimeError, match="drawn"):
        DRAWING[name](True, draw)
    # Positions of a group are claimed before it is called.
    drawn = {op.name for op in OPS.values() for operand in op.operands if operand.name in table.STREAM_OPERANDS}
    assert drawn == {*DRAWING, "add_noise_group_"}


def test_gradient():
    x = torch.ones(2, requires_grad=True)
    SMOOTH(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_compiled_calls_are_one_node_of_the_graph():
    targets: list[str] = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    assert torch.compile(lambda x: PLAIN(x + 1, 2.0), backend=backend, fullgraph=True)(torch.ones(2)).tolist() == [4, 4]
    assert any("test_plain" in target for target in targets)
