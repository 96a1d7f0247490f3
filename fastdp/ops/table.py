"""The table of ops: each has one schema, one definition in torch, and an implementation per device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("fastdp", "DEF")

#: Every op by name; filled as the modules of this package are imported.
OPS: dict[str, Op] = {}


class Op:
    """One operation: callable on tensors of any device, registered as ``torch.ops.fastdp.<name>``.

    A call in eager mode goes straight to the device's implementation; only while ``torch.compile`` traces does it pass
    through the dispatcher, whose overhead would dominate the many small calls of a LoRA step.

    Args:
        schema: the schema of ``torch.library``, name included.
        reference: the definition, in plain torch; runs wherever no faster implementation is registered.
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
        self.reference = reference
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
        #: Which argument says the device: the first that is a tensor or a list of them.
        self._first = [str(a.type) in ("Tensor", "List[Tensor]") for a in self._overload._schema.arguments].index(True)
        OPS[self.name] = self

    def implement(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate the implementation for a device type (``cpu``, ``cuda``)."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            self.implementations[device] = function
            return function

        return register

    def implement_with_triton(self, module: str) -> None:
        """Use the function of this op's name in ``fastdp.kernels.<module>`` on CUDA; imported when first called.

        Where Triton is not installed the definition runs there.
        """

        def first_call(*args: Any) -> Any:
            chosen = self.reference
            if importlib.util.find_spec("triton") is not None:
                chosen = getattr(importlib.import_module(f"fastdp.kernels.{module}"), self.name)
            self.implementations["cuda"] = chosen
            return chosen(*args)

        self.implementations["cuda"] = first_call

    def _run(self, *args: Any) -> Any:
        self.check(*args)
        first = args[self._first]
        device = (first if isinstance(first, torch.Tensor) else first[0]).device.type
        return self.implementations.get(device, self.reference)(*args)

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._overload(*args)
        recorded = self.differentiable and torch.is_grad_enabled()
        for a in args:
            # Autograd, and tensors that hold no data of their own (fake, functional), exist only behind the dispatcher.
            for x in a if type(a) is list else (a,):
                if isinstance(x, torch.Tensor) and (
                    (recorded and x.requires_grad) or type(x) not in (torch.Tensor, torch.nn.Parameter)
                ):
                    return self._overload(*args)
        return self._run(*args)

    def __repr__(self) -> str:
        return f"fastdp.ops.{self.schema}"
