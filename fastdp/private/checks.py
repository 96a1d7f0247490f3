"""What `make_private` refuses before anything is spent: models, optimizers and budgets that cannot be made private."""

from __future__ import annotations

import math
import os

import torch


def check_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a model that mixes examples, runs in several processes, or does not fit its optimizer."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        raise ValueError("give the bare model, not a DataParallel or DistributedDataParallel wrapper")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if grouped and torch.distributed.get_world_size() > 1:
        # Each process would draw its own batches and its own noise, which nobody has accounted for.
        raise ValueError("private training runs in one process; start it without a distributed launcher")
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and not grouped:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but no process group was opened: each process would train on the same "
            "data as if it were alone; start it without a distributed launcher"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS differentiates several times a step, and a step is one release; use SGD, Adam or AdamW")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not _constant(module):
            raise ValueError(
                f"{name} is a batch normalisation, which mixes examples; replace it by group or layer norm, or freeze it: "
                "requires_grad=False, and eval mode after each model.train()"
            )
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(f"{name} has max_norm, which rewrites rows by what the batch contains; set it to None")
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise ValueError("the model adds a balancing loss across the batch; set config.output_router_logits = False")
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no trained parameter: every requires_grad is False")
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = {id(p) for p in model.parameters()}
    if given - known:
        raise ValueError(
            "the optimizer also holds parameters of another model; give each model an optimizer of its own"
        )
    for key, name in trained.items():
        if key not in given:
            raise ValueError(
                f"{name} is trained but the optimizer does not hold it: add it, or set requires_grad=False"
            )


#: Where forward passes come from that end in a loss over all tokens of a batch, computed with the head, and how to do without.
_FUSED = {
    "liger_kernel.transformers.model": "apply Liger's kernels with fused_linear_cross_entropy=False and cross_entropy=False",
    "cut_cross_entropy": "do not patch the model with cce_patch",
}


def refuse_fused_loss(model: torch.nn.Module) -> None:
    """Raise ValueError for a forward pass of Liger's or CCE's, whose loss is one number for a whole batch."""
    for name, module in model.named_modules():
        forward = getattr(module.forward, "__func__", module.forward)
        home = getattr(forward, "__module__", None) or ""
        for package, remedy in _FUSED.items():
            if home == package or home.startswith(f"{package}."):
                raise ValueError(
                    f"{name or type(module).__name__} ends in the fused loss of {home.partition('.')[0]}, which is a mean over "
                    f"the tokens of a whole batch: {remedy}, since private training leaves the logits out itself, or give "
                    "make_private a criterion= of one loss a row"
                )


def _constant(module: torch.nn.Module) -> bool:
    """Whether a batch normalisation scales by known numbers alone: in eval mode, with statistics kept, and frozen."""
    frozen = not any(p.requires_grad for p in module.parameters())
    return frozen and not module.training and module.running_mean is not None


def _processes() -> int:
    """Processes that train together, or that a launcher started to do so before they formed a group."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def refuse_frozen(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a frozen parameter in the optimizer's groups, where the method is to choose what is trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in held and not parameter.requires_grad:
            raise ValueError(
                f"{name} is frozen and stands in the optimizer's groups: give the optimizer the parameters with "
                "requires_grad=True, from which the method chooses"
            )


def check_budget(
    delta: float | None,
    epsilon: float | None,
    noise_multiplier: float | None,
    mechanism: str,
    units: int,
    allow_large_delta: bool = False,
) -> None:
    """Raise ValueError for a budget out of range or stated twice, or not at all, and for a delta not below 1/N."""
    if (epsilon is None) == (noise_multiplier is None) and mechanism != "non-private":
        raise ValueError("give either target_epsilon or noise_multiplier")
    if noise_multiplier is not None and not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
        raise ValueError(f"noise_multiplier is {noise_multiplier}: it must be 0 or more")
    if epsilon is not None and not epsilon > 0:
        raise ValueError(f"target_epsilon is {epsilon}: it must be positive (inf for no privacy)")
    if delta is None:
        if epsilon is not None and math.isfinite(epsilon):
            raise ValueError("target_epsilon needs target_delta, a probability well below 1/N")
        return
    if not 0 < delta < 1:
        raise ValueError(f"target_delta is {delta}: it must lie between 0 and 1")
    if delta >= 1 / units and not allow_large_delta:
        raise ValueError(
            f"target_delta {delta:g} is not below 1/N = {1 / units:.3g}: it would allow publishing a whole example; lower it, "
            "or confirm it with allow_large_delta=True"
        )
