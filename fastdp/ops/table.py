"""The table of ops: each has one schema, one definition in torch, an implementation per device, and checks of its tensors."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .factors import in_full_precision
from .stream import need_no_threads

#: Operands that the host reads: they may be on the CPU, wherever the others are.
ON_HOST = frozenset(("position", "drawn", "offsets", "offsets1", "offsets2"))
#: Operands for which a `NoiseStream` may be given: an op then takes its next position, or a row of them.
STREAM_OPERANDS = ("position", "drawn")
#: Tensors that hold data of their own: not fake, functional or distributed.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
#: The most tensors of which every pair is compared for shared memory.
_MOST_COMPARED = 16
_library = torch.library.Library("fastdp", "DEF")

#: Every op by name; filled as the modules of this package are imported.
OPS: dict[str, Op] = {}


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of an op, or a list of them, as its schema declares it."""

    index: int
    name: str
    is_list: bool
    is_optional: bool
    is_written: bool

    @classmethod
    def of(cls, index: int, argument: Any) -> Operand:
        """An argument of a schema."""
        kind, alias = str(argument.type), argument.alias_info
        return cls(index, argument.name, "List" in kind, "Optional" in kind, alias is not None and alias.is_write)


class Operands(NamedTuple):
    """What was passed for an op's operands.

    Args:
        tensors: one sequence an operand.
        device: of all but what the host reads.
        dispatched: whether torch's dispatcher has something to do: autograd, tensors without data of their own, negative views.
    """

    tensors: list[Sequence[Any]]
    device: torch.device | None
    dispatched: bool


def inspect(operands: Sequence[Operand], args: Sequence[Any], *, recorded: bool) -> Operands:
    """Look at every operand once: a step calls this a hundred times.

    A stream may stand for a position, and ``recorded`` says whether autograd records this op.

    Raises:
        TypeError: for what is no tensor.
        ValueError: unless all are on one device, or for a negated view that is written.
    """
    found: list[Sequence[Any]] = []
    first, device, dispatched = "", None, False
    for operand in operands:
        given = args[operand.index]
        if not operand.is_list:
            given = () if given is None and operand.is_optional else (given,)
        elif not isinstance(given, (list, tuple)):
            raise TypeError(f"{operand.name} must be a list of tensors, got {type(given).__name__}")
        found.append(given)
        for x in given:
            if type(x) not in _PLAIN:
                if not isinstance(x, Tensor):
                    if operand.name == "position" or (operand.name == "drawn" and hasattr(x, "take")):
                        continue
                    raise TypeError(f"{operand.name} must be a tensor, got {type(x).__name__}")
                dispatched = True
            elif x.is_neg():
                if operand.is_written:
                    raise ValueError(f"{operand.name} is a lazily negated view: pass resolve_neg() of it")
                dispatched = True
            if x.device != device and not (operand.name in ON_HOST and x.device.type == "cpu"):
                if device is not None:
                    raise ValueError(
                        f"{operand.name} is on {x.device} and {first} on {device}: move them to one device"
                    )
                first, device = operand.name, x.device
            dispatched = dispatched or (recorded and x.requires_grad)
    return Operands(found, device, dispatched)


def check_tensors(**given: Any) -> None:
    """Raise TypeError, naming the first that is not, unless all are tensors."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")


def check_written(operands: Sequence[Operand], passed: Operands) -> None:
    """Refuse to write tensors that autograd records, whose elements share memory, or that overlap another operand.

    Of many tensors, those that begin at one address are found; of a few, contiguous ones wherever they overlap.
    """
    written: list[tuple[str, Tensor]] = []
    read: list[tuple[str, Tensor]] = []
    recorded = torch.is_grad_enabled()
    for operand, tensors in zip(operands, passed.tensors):
        name = operand.name
        for x in tensors:
            if not operand.is_written:
                if isinstance(x, Tensor):
                    read.append((name, x))
                continue
            if x.is_meta:
                # Tensors without values have no addresses.
                return
            if recorded and x.requires_grad:
                raise RuntimeError(
                    f"{name} requires grad and would be changed in place: call this under torch.no_grad()"
                )
            if not x.is_contiguous() and _overlaps_itself(x):
                raise ValueError(f"elements of {name} may share memory: make it contiguous first")
            written.append((name, x))
    if len(written) + len(read) > _MOST_COMPARED:
        begins = [x.data_ptr() for _, x in written if x.numel()]
        if len({*begins}) < len(begins) or not {*begins}.isdisjoint([x.data_ptr() for _, x in read]):
            raise ValueError(f"{written[0][0]} and another operand share memory: give each tensor memory of its own")
        return
    extents = [(name, x.data_ptr(), x.nbytes, x.is_contiguous()) for name, x in (*written, *read)]
    for at, (name, begin, length, dense) in enumerate(extents[: len(written)]):
        for other, start, size, also_dense in extents[at + 1 :]:
            # The later of two dense ones begins behind the earlier; of others only the beginnings are compared.
            disjoint = start - begin >= length or begin - start >= size if dense and also_dense else begin != start
            if not disjoint and length and size:
                pair = f"two of {name}" if name == other else f"{name} and {other}"
                raise ValueError(f"{pair} share memory: give each tensor memory of its own")


def _overlaps_itself(x: Tensor) -> bool:
    reach = 0  # of the dimensions with shorter strides
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size > 1 and stride <= reach:
            return x.numel() > 0
        reach += stride * (size - 1)
    return False


class Op:
    """One operation: callable on tensors of any device, registered as ``torch.ops.fastdp.<name>``.

    An eager call on plain tensors goes straight to the device's implementation: the dispatcher would take longer than the many
    small calls of a LoRA step. Traced calls, tensor subclasses and recorded gradients go through the dispatcher.

    Args:
        schema: the schema of ``torch.library``, name included.
        reference: the definition, in plain torch; runs, without autograd and outside autocast, wherever nothing faster is
            registered or what is does not serve the arguments.
        fake: shapes and dtypes of the result, without data.
        check: raises ValueError or TypeError, in one clear sentence, for arguments the op is not defined on.
        backward: ``(ctx, *gradients of the outputs) -> gradient of each argument``, for ops that have a gradient.
        setup_context: ``(ctx, inputs, output)``, saves what ``backward`` needs.
    """

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable[..., Any],
        fake: Callable[..., Any],
        check: Callable[..., None],
        backward: Callable[..., Any] | None = None,
        setup_context: Callable[..., None] | None = None,
    ):
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self.reference = in_full_precision(reference)
        self.check = check
        self.implementations: dict[str, Callable[..., Any]] = {}
        #: The module of `fastdp.kernels` that serves it on GPUs, if one does.
        self.family: str | None = None
        self.__doc__ = reference.__doc__
        _library.define(schema)
        _library.impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastdp::{self.name}", fake, lib=_library)
        self.differentiable = backward is not None
        if backward is not None:
            torch.library.register_autograd(f"fastdp::{self.name}", backward, setup_context=setup_context, lib=_library)
        self._overload = getattr(torch.ops.fastdp, self.name).default
        arguments = self._overload._schema.arguments
        #: Tensors and lists of them; the first says the device.
        self.operands = [Operand.of(i, a) for i, a in enumerate(arguments) if "Tensor" in str(a.type)]
        self.writes = any(operand.is_written for operand in self.operands)
        #: Which argument, if any, may be a stream: its next position is taken once the arguments are found good.
        self._position = next((i for i, a in enumerate(arguments) if a.name in STREAM_OPERANDS), None)
        OPS[self.name] = self

    def implement(self, device: str, function: Callable[..., Any]) -> None:
        """Run a function in the definition's place on a device type (``cpu``, ``cuda``).

        The function takes the schema's arguments, checked, and returns the result, or NotImplemented where the definition
        should run (float64 factors, say).
        """
        self.implementations[device] = function

    def in_family(self, family: str) -> None:
        """Run the function of the op's name in the module ``fastdp.kernels.<family>`` on GPUs.

        The first call imports it; without Triton the definition runs.
        """

        def first_call(*args: Any) -> Any:
            try:
                function = getattr(importlib.import_module(f"fastdp.kernels.{family}"), self.name)
            except ModuleNotFoundError as missing:
                if missing.name != "triton":
                    raise
                function = self.reference
            self.implement("cuda", function)
            return function(*args)

        self.family = family
        self.implement("cuda", first_call)

    def on_cpu(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the function that runs on processors."""
        self.implement("cpu", function)
        return function

    def on(self, device: str, *args: Any) -> Any:
        """Run the op as a device type does, without a check of its arguments."""
        need_no_threads()
        function = self.implementations.get(device)
        try:
            result = NotImplemented if function is None else function(*args)
        except Exception as error:
            # What writes into its arguments may have begun to.
            if self.writes or not _is_uncompiled(error):
                raise
            warnings.warn(
                f"fastdp's kernel for {self.name} does not compile for this GPU, so torch computes it, slower: {error}",
                stacklevel=2,
            )
            self.implementations[device] = self.reference
            result = NotImplemented
        return self.reference(*args) if result is NotImplemented else result

    def _run(self, *args: Any) -> Any:
        """Run the op for torch's dispatcher."""
        return self._perform(args, inspect(self.operands, args, recorded=False))

    def _perform(self, args: tuple[Any, ...], passed: Operands) -> Any:
        # A stream, which stands for a position, is no tensor: checks of the family know it.
        self.check(*args)
        if self.writes:
            check_written(self.operands, passed)
        if self._position is not None:
            args = self._drawn(args)
        assert passed.device is not None
        return self.on(passed.device.type, *args)

    def _drawn(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with a position taken from the stream that was given in its place."""
        at = self._position
        if at is None or isinstance(args[at], torch.Tensor):
            return args
        taken = args[at].take()
        if self._overload._schema.arguments[at].name == "drawn":
            taken = taken.unsqueeze(0)
        return (*args[:at], taken, *args[at + 1 :])

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            # A graph takes no list of a class of its own.
            return self._overload(*[[*x] if isinstance(x, list) else x for x in self._drawn(args)])
        passed = inspect(self.operands, args, recorded=self.differentiable and torch.is_grad_enabled())
        if not passed.dispatched:
            return self._perform(args, passed)
        if self._position is not None:
            # Before a position is spent.
            self.check(*args)
            if self.writes:
                check_written(self.operands, passed)
        return self._overload(*self._drawn(args))

    def __repr__(self) -> str:
        return f"fastdp.ops.{self.schema}"


def _is_uncompiled(error: Exception) -> bool:
    """Whether Triton, or the compiler below it, could not make a kernel, or the GPU has no room for it."""
    return type(error).__module__.startswith("triton.") or "PassManager::run failed" in str(error)


@contextlib.contextmanager
def definitions() -> Iterator[None]:
    """Within this every op runs its definition, on every device: what tests and benchmarks compare with. For one thread."""
    held = {op: op.implementations for op in OPS.values()}
    try:
        for op in held:
            op.implementations = {}
        yield
    finally:
        for op, implementations in held.items():
            op.implementations = implementations
