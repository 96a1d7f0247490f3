"""What `make_private` refuses before anything is spent: models, optimizers and budgets that cannot be made private."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from fastdp.calls.collation import spread_indices
from fastdp.calls.modes import refuse_mixing
from fastdp.distributed.pieces import is_dtensor
from fastdp.distributed.ranks import pass_through
from fastdp.distributed.shards import check_pieces
from fastdp.private.provenance import checksums
from fastdp.private.sampler import Units

#: Wrappers that gather, cut or reduce gradients before any of them could be clipped, and what is wrong with each.
_FOREIGN_WRAPPERS = {
    "FullyShardedDataParallel": "FullyShardedDataParallel flattens parameters, whose gradients nothing can then tell apart",
    "DeepSpeedEngine": "DeepSpeed takes gradients out of the backward pass before they are clipped",
}
#: Examples of the data that processes compare before they train together.
_COMPARED = 8


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside wrappers that private training does without: those of data parallelism and of torch's compiler.

    A wrapper of data parallelism stays usable, and hands calls on; sums are added up elsewhere, after they are clipped.
    """
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            pass_through(model)
            model = model.module
        elif isinstance(model, torch.nn.DataParallel) and len(model.device_ids) < 2:
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), torch.nn.Module):
            warnings.warn(
                "the model was compiled as a whole: private steps run without the compiler, and evaluation stays compiled",
                stacklevel=3,
            )
            model = inner
        else:
            break
    block = next(
        (n for n, m in model.named_modules() if n and (hasattr(m, "_orig_mod") or m._compiled_call_impl)), None
    )
    if block is not None:
        warnings.warn(
            f"{block} was compiled, and private training steps run it without the compiler; evaluation stays compiled",
            stacklevel=3,
        )
    return model


def digest_setup(model: torch.nn.Module, dataset: Any, units: Units, method: Any) -> dict[str, Any]:
    """What processes that train together must have alike, by name: short digests of a model, and of a few of the examples."""
    shapes = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()]
    held = (*model.named_parameters(), *model.named_buffers())
    here = {n: t for n, t in held if type(t.data) is torch.Tensor and t.device.type != "meta"}
    values = dict(zip(here, checksums(here.values())))
    some = spread_indices(len(dataset), _COMPARED)
    read = [(index, _digest(dataset[index]), _digest(dataset[index])) for index in some]
    return {
        "the model": repr(shapes),
        "the size of the data set": len(dataset),
        "the users of its examples": zlib.crc32(repr(units.members).encode()),
        # One that is not the same twice is augmented, and may be otherwise elsewhere.
        "an example of the data set": [(index, one) for index, one, two in read if one == two],
        "a weight or a buffer of the model": values,
        "what the method was given to read": [_digest(tensor) for tensor in _tensors_of(method)],
    }


def _tensors_of(settings: Any) -> Iterator[torch.Tensor]:
    """The tensors among settings, and among theirs: public examples, sizes."""
    if is_dataclass(settings):
        settings = vars(settings)
    if isinstance(settings, torch.Tensor):
        yield settings
    elif isinstance(settings, (Mapping, list, tuple)):
        for own in settings.values() if isinstance(settings, Mapping) else settings:
            yield from _tensors_of(own)


def _digest(item: Any) -> int:
    if isinstance(item, Mapping):
        return zlib.crc32(repr([(key, _digest(item[key])) for key in item]).encode())
    if isinstance(item, (list, tuple)) and any(isinstance(value, torch.Tensor) for value in item):
        return zlib.crc32(repr([_digest(value) for value in item]).encode())
    if isinstance(item, torch.Tensor):
        plain = item.detach().cpu().contiguous()
        return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return zlib.crc32(repr(item).encode())


def check_model(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a model that mixes examples, or does not fit its optimizer or its processes."""
    _refuse_wrappers(model)
    check_pieces(model)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} has no hooks of torch's optimizers, since its __init__ does not call its parent's: call "
            "it, or give make_private the optimizer inside"
        )
    each = getattr(optimizer, "optimizers", [optimizer])
    if any(isinstance(own, torch.optim.LBFGS) for own in each):
        raise ValueError("LBFGS differentiates several times a step, and a step is one release; use SGD, Adam or AdamW")
    refuse_mixing(model)
    _refuse_layers(model)
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("the model has no trained parameter: every requires_grad is False")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_quantized or hasattr(parameter, "quant_state")):
            raise ValueError(
                f"{name} is quantised, and its packed numbers have no gradient of their own: set requires_grad=False, and train "
                "LoRA beside it"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"{name} is complex, and gradients are clipped and noised as real numbers. Keep it as real [..., 2], and read it "
                "by torch.view_as_complex"
            )
    for own in each:
        _check_eps(own, trained)
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    known = {id(p) for p in model.parameters()}
    if given - known:
        raise ValueError(
            "the optimizer also holds parameters of another model; give each model an optimizer of its own"
        )
    for key, name in trained.items():
        if key not in given:
            raise ValueError(
                f"{name} is trained but the optimizer does not hold it: add it, join its own by "
                "fastdp.optim.ChainedOptimizer, or set requires_grad=False"
            )


def _refuse_wrappers(model: torch.nn.Module) -> None:
    """Raise ValueError for a model that is copied or started without a process group, and for one without weights yet."""
    if isinstance(model, torch.nn.DataParallel):
        raise ValueError(
            "a DataParallel wrapper copies the model for each device within one process: give the bare model, and start a "
            "process for each device with torchrun"
        )
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1") and not grouped:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but no process group was opened. Call "
            "torch.distributed.init_process_group() first, or start one process."
        )
    for kind in type(model).__mro__:
        if kind.__name__ in _FOREIGN_WRAPPERS:
            raise ValueError(
                f"{_FOREIGN_WRAPPERS[kind.__name__]}: give the bare model, in a process group of torch's own"
            )
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"{name} is not initialized yet: call the model on one batch, then build the optimizer, then call make_private"
            )


def _refuse_layers(model: torch.nn.Module) -> None:
    """Raise ValueError for layers and settings that let the batch or unreleased gradients decide."""
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(f"{name} has max_norm, which rewrites rows by what the batch contains; set it to None")
        if any(kind.__name__ == "AdaLoraLayer" for kind in type(module).__mro__):
            raise ValueError(
                "AdaLoRA chooses its ranks by gradients without noise: use LoRA, with rank_pattern where ranks should differ"
            )
        if type(module).__name__ == "MultiheadAttention" and type(module).__module__.startswith("peft."):
            raise ValueError(
                f"LoRA on {name}, an nn.MultiheadAttention, rewrites frozen weights in each pass: leave it out of target_modules "
                "or adapt opacus.layers.DPMultiheadAttention"
            )
        if type(module).__name__.endswith("MeanScaler") and module.default_scale is None:
            raise ValueError(
                f"{name} scales a series without values by the batch's mean: set model.{name}.default_scale = 1.0"
            )
        if type(module).__name__ == "AutoformerAttention":
            raise ValueError(f"{name} chooses delays by a mean over the batch, which couples examples: use Informer")
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise ValueError("the model adds a balancing loss across the batch; set config.output_router_logits = False")


def _check_eps(optimizer: torch.optim.Optimizer, trained: Mapping[int, str]) -> None:
    """Raise ValueError if the optimizer would divide by zero where noise rounds to zero, or has no finite lr."""
    # Torch's own optimizers calculate in the type of the weights.
    stock = any(kind.__module__.startswith(("torch.optim.", "fastdp.optim")) for kind in type(optimizer).__mro__[:-2])
    for group in optimizer.param_groups:
        rate = group.get("lr", 0.0)
        if isinstance(rate, (int, float)) and not math.isfinite(rate):
            raise ValueError(
                f"The optimizer's lr is {rate}: give it a finite one, as the first step would spoil all weights"
            )
        eps = group.get("eps")
        # Adafactor has two, of other meanings.
        if not isinstance(eps, (int, float)) or not stock:
            continue
        if eps == 0:
            raise ValueError(
                "eps is 0, and a coordinate whose noise rounds to 0 divides 0 by 0: set eps above 0, such as 1e-8"
            )
        for parameter in group["params"] if type(optimizer).__module__.startswith("torch.optim") else ():
            if parameter.is_floating_point() and not torch.tensor(eps, dtype=parameter.dtype):
                raise ValueError(
                    f"{trained.get(id(parameter), 'a parameter')} is {parameter.dtype}, which rounds the "
                    f"optimizer's eps of {eps:g} to zero. Load the model with dtype=torch.float32, and save "
                    "memory by torch.autocast."
                )


def refuse_repeats(dataset: Any, units: Units) -> None:
    """Raise ValueError where what picks from a data set puts one example in several places, and so among several units."""
    if type(dataset) not in (Subset, ConcatDataset) and not _picks_rows(dataset):
        return
    # Rows beyond a user's limit are in none, and never read.
    owned = [(place, unit) for unit in range(len(units)) for place in units.examples(unit)]
    places, owners = (torch.tensor(each) for each in zip(*owned))
    picked = _picked(dataset, {})[places]
    order = picked.argsort(stable=True)
    picked, owners = picked[order], owners[order]
    again = ((picked[1:] == picked[:-1]) & (owners[1:] != owners[:-1])).nonzero()
    if len(again):
        one, other = places[order[int(again[0]) :][:2]].tolist()
        raise ValueError(
            f"Examples {one} and {other} of the data set are the same one. Leave repeats out of Subset, "
            "ConcatDataset and select, or give user_ids."
        )


def _picked(dataset: Any, leaves: dict[int, torch.Tensor]) -> torch.Tensor:
    """The number of the example in each place, among all of the data sets that are picked from: int64."""
    if type(dataset) is ConcatDataset:
        return torch.cat([_picked(part, leaves) for part in dataset.datasets])
    if type(dataset) is Subset:
        return _picked(dataset.dataset, leaves)[torch.as_tensor(list(dataset.indices), dtype=torch.int64)]
    if _picks_rows(dataset):
        rows = torch.tensor(dataset._indices.column(0).to_pylist(), dtype=torch.int64)
        return _numbered(dataset.data, dataset.data.num_rows, leaves)[rows]
    return _numbered(dataset.data if _has_rows(dataset) else dataset, len(dataset), leaves)


def _numbered(leaf: Any, size: int, leaves: dict[int, torch.Tensor]) -> torch.Tensor:
    if id(leaf) not in leaves:
        begin = sum(map(len, leaves.values()))
        leaves[id(leaf)] = torch.arange(begin, begin + size)
    return leaves[id(leaf)]


def _has_rows(dataset: Any) -> bool:
    """Whether it is a `datasets.Dataset`, which is not imported here: rows of a table, of which `_indices` may pick some."""
    return any(
        f"{kind.__module__}.{kind.__qualname__}" == "datasets.arrow_dataset.Dataset" for kind in type(dataset).__mro__
    )


def _picks_rows(dataset: Any) -> bool:
    return _has_rows(dataset) and dataset._indices is not None


def refuse_in_pieces(model: torch.nn.Module, *, keep_logits: bool | None) -> None:
    """Raise ValueError for what needs whole weights, where they are in pieces."""
    if keep_logits is False and any(map(is_dtensor, model.parameters())):
        raise ValueError(
            "keep_logits is False, and tiles of logits need the head's weight after the backward pass, when it is in pieces "
            "again: leave keep_logits out"
        )


def refuse_capture(
    model: torch.nn.Module, *, returns_loss: bool, two_pass: bool | None, keep_logits: bool | None
) -> None:
    """Raise ValueError where micro-batches cannot be recorded and replayed."""
    if keep_logits is False:
        raise ValueError("capture records the logits as a whole: leave keep_logits=False or capture out")
    if two_pass:
        raise ValueError("capture records one backward pass, and two_pass=True asks for two: leave one of them out")
    if any(p.device.type != "cuda" or is_dtensor(p) for p in model.parameters()):
        raise ValueError(
            "capture records CUDA graphs, and this model's weights do not lie whole on a GPU: leave capture out, or move the "
            "model there first"
        )
    if not returns_loss:
        raise ValueError(
            "capture needs a model that returns its loss: leave capture or loss_reduction and criterion out"
        )


#: What `init_lora_weights` calls the ways in which peft makes an adapter's first weights of examples.
_FROM_EXAMPLES = ("eva", "corda", "lora_ga")


def refuse_made_of_examples(model: torch.nn.Module) -> None:
    """Raise ValueError for adapters whose first weights were made of examples: they leave with the model, unaccounted for."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for adapter, config in configs.items() if isinstance(configs, Mapping) else ():
            way = getattr(config, "init_lora_weights", None)
            if way in _FROM_EXAMPLES:
                raise ValueError(
                    f"init_lora_weights={way!r} makes adapter {adapter!r} of examples. Use another "
                    f"initialisation or, if they were public, set peft_config[{adapter!r}].init_lora_weights = "
                    "True."
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
                    f"{name or type(module).__name__} ends in {home.partition('.')[0]}'s fused loss, a mean "
                    f"over a batch's tokens: {remedy}, or pass criterion= of one loss a row."
                )


def refuse_frozen(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a frozen parameter in the optimizer's groups, where the method is to choose what is trained."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in held and not parameter.requires_grad:
            raise ValueError(
                f"{name} is frozen and stands in the optimizer's groups: give the optimizer the parameters with "
                "requires_grad=True, from which the method chooses"
            )


def refuse_accumulation(wrapper: Any) -> None:
    """Raise ValueError for accelerate's wrapper of an optimizer that would leave out steps, each of which is a release."""
    count = getattr(getattr(wrapper, "gradient_state", None), "num_steps", 1)
    if count > 1:
        raise ValueError(
            f"accelerate's gradient_accumulation_steps is {count}, so that it would leave out releases: set it to 1, and bound "
            "memory by max_physical_batch_size"
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
