"""Code written to leak, which only ``isolation="per_example"`` holds: rows that never meet cannot reach each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from . import kit
from .kit import Library, Net, Task, constant, net, outlier, records

attack = kit.register("leaks", mode={"isolation": "per_example"}, unmode={"self_check": False})


@attack("A loop sets an attribute of the model after some steps, and rows mix from then on.")
def late_switch(library: Library) -> float:
    switched = net(before=lambda own, x: x + own.mixing * x.mean(0), mixing=0.0)

    def switch(private: Any) -> None:
        private.model.mixing = 0.1

    return library.moved(Task(switched), records(16), outlier(1e6), 0.2, 7, switch)


@attack("A forward hook on all modules of the process is added after some steps, and mixes rows.")
def late_global_hook(library: Library) -> float:
    def mix(module: Any, args: Any, output: Any) -> Any:
        return output + 0.1 * output.mean(0) if isinstance(module, torch.nn.Linear) else None

    both = []
    for data in (records(16), [*records(16), outlier(1e6)]):
        handles: list[Any] = []
        try:
            hang = lambda _, handles=handles: handles.append(register_module_forward_hook(mix))  # noqa: E731
            both.append(library.release(Task(Net), data, 0.2, 7, hang).sums)
        finally:
            for handle in handles:
                handle.remove()
    return kit.distance(*both) / 0.2


@attack("The deviation of noise, or the rate of a mask, follows the batch's largest entry.")
def law_of_a_draw(library: Library) -> float:
    models = (
        net(before=lambda own, x: torch.normal(x, x.detach().abs().max().expand(x.shape) / 100)),
        net(before=lambda own, x: x * torch.bernoulli((1 / (1 + x.detach().abs().max())).expand(x.shape))),
    )
    return kit.weakest(
        lambda model: library.moved(Task(model, options={"unsafe_seed": 1}), records(16), outlier(100.0), 0.2), models
    )


@attack("A backward pass shortens the gradients of a batch that together are too long.")
def rare_backward(library: Library) -> float:
    class Shortened(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            size = gradients[0].norm()
            return gradients[0] * (3.0 / size) if size > 3.0 else gradients[0]

    def forward(own: Any, x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> Any:
        hidden = Shortened.apply(torch.tanh(own.first(x)))
        return {"loss": torch.nn.functional.cross_entropy(own.second(hidden) * weight[:, None], labels)}

    others = [{**record, "weight": 1.0} for record in records(16)]
    after = {**constant(-1.0, 2), "weight": 1e5}
    return library.moved_by_change(Task(net(forward=forward)), others, others[0], after)


@attack("A checkpointed layer counts its runs, and norms come from another recomputation than sums.")
def late_recomputation(library: Library) -> float:
    from torch.utils.checkpoint import checkpoint

    def block(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        own.runs += torch.is_grad_enabled()
        return hidden * (1e4 if own.runs > 40 and own.runs % 2 == 0 else 1.0)

    between = lambda own, hidden: checkpoint(own.block, hidden, use_reentrant=True)  # noqa: E731
    task = Task(net(block=block, between=between, gradient_checkpointing=True, runs=0))
    steps = library.release(task, records(16, 0.01), 1e-3, 48).steps
    return max(float(kit.flatten(sums).norm()) for sums in steps) / 1e-3 / 16


@attack("A loop sets an attribute of the model to the sign of a batch number, which turns every record.")
def loop_sets_attribute(library: Library) -> float:
    model: Any = net(before=lambda own, x: own.sign * x, sign=1.0)()

    def loop(batch: Any) -> Any:
        model.sign = 1.0 if batch["x"].abs().max() < 100 else -1.0
        return batch

    return library.moved(Task(lambda: model, loop=loop), records(16), outlier(1e3), 0.2)
