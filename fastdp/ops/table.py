"""The table of ops: each has one schema, one definition in torch, and an implementation per device."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .factors import in_full_precision
from .operands import Operand, Operands, check_written, inspect
from .stream import need_no_threads

_library = torch.library.Library("fastdp", "DEF")

#: Every op by name; filled as the modules of this package are imported.
OPS: dict[str, Op] = {}


class Op:
    """One operation: callable on tensors of any device, registered as ``torch.ops.fastdp.<name>``.

    A call in eager mode goes straight to the device's implementation; only while ``torch.compile`` traces does it pass
    through the dispatcher, whose overhead would dominate the many small calls of a LoRA step.

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
        self.operands = Operand.all_of(arguments)
        self.writes = any(operand.is_written for operand in self.operands)
        #: Which argument, if any, may be a stream: its next position is taken once the arguments are found good.
        self._position = next((i for i, a in enumerate(arguments) if a.name == "position"), None)
        OPS[self.name] = self

    def implement(self, device: str, function: Callable[..., Any] | str) -> None:
        """Say what runs on a device type (``cpu``, ``cuda``), where the definition does otherwise.

        Args:
            device: a type, as ``torch.device`` names it.
            function: takes the schema's arguments, checked, and returns the result, or NotImplemented where the
                definition should run (float64 factors, say). Or the module that holds it by the op's name: imported
                by the first call, and the definition runs if that module wants Triton and there is none.
        """
        self.implementations[device] = function if callable(function) else self._imported(device, function)

    def in_family(self, family: str) -> None:
        """Say that functions of the op's name run on processors and on GPUs, in the files of a family: see `fastdp.ops`."""
        self.implement("cpu", f"fastdp.ops.cpu.{family}")
        self.implement("cuda", f"fastdp.kernels.{family}")

    def _imported(self, device: str, module: str) -> Callable[..., Any]:
        def first_call(*args: Any) -> Any:
            try:
                function = getattr(importlib.import_module(module), self.name)
            except ModuleNotFoundError as missing:
                if missing.name != "triton":
                    raise
                function = self.reference
            self.implementations[device] = function
            return function(*args)

        return first_call

    def on(self, device: str, *args: Any) -> Any:
        """What a call comes to on a device type, its arguments taken as they are."""
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
        """A call by torch's dispatcher."""
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
        return (*args[:at], args[at].take(), *args[at + 1 :])

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._overload(*self._drawn(args))
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
