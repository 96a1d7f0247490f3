"""Small models, data and runs that the tests of the engine share, and the definition they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fastdp.bench.fuzz import alone
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.private.observer import Observer
from fastdp.private.run import Private

FEATURES, CLASSES = 5, 3
EXACT = 1e-5
#: Of clipped sums: a unit is scaled by an upper bound of its norm, which is above the norm by what rounding may hide.
CLIPPED = 1e-4
Batch = dict[str, torch.Tensor]
#: Of a run whose noise, and epsilon, are real.
PRIVATE: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3}


class Classifier(nn.Module):
    """Two linear layers and their own cross-entropy."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 7)
        self.second = nn.Linear(7, CLASSES)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return None, *torch.autograd.grad(ctx.function(*inputs), inputs, gradients[0])


def opaque(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """A formula with a derivative of its own: no rule can be known for what it reads."""
    out: torch.Tensor = _Opaque.apply(function, *tensors)
    return out


class Odd(Classifier):
    """Reads a trained matrix in a way no per-example rule is known for."""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(self.first.weight.shape, dtype=x.dtype).copy_(self.first.weight)
        return self.second(torch.tanh(F.linear(x, weight, self.first.bias)))


def examples(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of features of different sizes, so that some are clipped and some are not, and a class."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"x": (1 + i % 4) * torch.randn(FEATURES, generator=generator), "labels": i % CLASSES} for i in range(count)
    ]


def collate(items: Sequence[Mapping[str, Any]]) -> Batch:
    return {"x": torch.stack([i["x"] for i in items]), "labels": torch.tensor([i["labels"] for i in items])}


def loader(data: Sequence[Any] | None = None, batch_size: int = 8, **options: Any) -> DataLoader:
    data = examples() if data is None else data
    return DataLoader(data, batch_size=batch_size, **{"collate_fn": collate, **options})  # type: ignore[arg-type]


def start(
    model: nn.Module | None = None,
    data_loader: DataLoader | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Private:
    """A private run, without noise and with a learning rate of 0 unless told otherwise."""
    model = Classifier() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0) if optimizer is None else optimizer
    data_loader = loader() if data_loader is None else data_loader
    if "target_epsilon" not in options:
        options = {"noise_multiplier": 0.0, **options}
    return fastdp.make_private(model, optimizer, data_loader, **{"epochs": 2, "unsafe_seed": 3, **options})


class Sums(Observer):
    """Keeps the clipped sums of each step, before their noise."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def before_release(self, accumulator: Any) -> None:
        self.steps.append({name: total.clone() for name, total in accumulator.sums.items()})


def logical_step(
    private: Private, iterator: Iterator[Any] | None = None
) -> tuple[dict[str, torch.Tensor], list[Batch]]:
    """Train on one logical batch; the gradients the optimizer was given, and the micro-batches."""
    iterator = iter(private.data_loader) if iterator is None else iterator
    batches = []
    private.optimizer.zero_grad()
    for batch in iterator:
        batches.append(batch)
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        if private.last_step_done:
            break
    gradients = {n: p.grad.clone() for n, p in private.model.named_parameters() if p.grad is not None}
    private.optimizer.zero_grad()
    return gradients, batches


def join(batches: Sequence[Batch]) -> Batch:
    return {key: torch.cat([b[key] for b in batches]) for key in batches[0]}


def one_by_one(model: nn.Module, batch: Batch) -> list[dict[str, torch.Tensor]]:
    """The gradient of each row's own loss, by a plain copy of the model in float64."""
    return alone(copy.deepcopy(model).double(), batch)


def clipped_sum(
    gradients: Sequence[Mapping[str, torch.Tensor]], bounds: Mapping[str, float] | float
) -> dict[str, torch.Tensor]:
    """The sum of gradients scaled to norm at most their bound; ``bounds`` by parameter joins equal keys' values.

    A float bounds the norm over all parameters; a mapping bounds that of each parameter alone.
    """
    total: dict[str, torch.Tensor] = {}
    for gradient in gradients:
        whole = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
        for name, g in gradient.items():
            size, bound = (whole, bounds) if isinstance(bounds, float) else (g.norm(), bounds[name])
            part = g * (bound / size).clamp(max=1)
            total[name] = total[name] + part if name in total else part
    return total


def error(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Distance of two sets of tensors over the size of the second, all parameters together."""
    assert got.keys() == expected.keys()
    gap = sum(float((got[n].double() - expected[n].double()).square().sum()) for n in expected)
    size = sum(float(e.double().square().sum()) for e in expected.values())
    return (gap / max(size, 1e-300)) ** 0.5


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
