"""Adapters that peft does not have: a bottleneck after each feed-forward block, and the biases alone (BitFit).

Importing this module makes the bottleneck known to peft. `peft.utils.register_peft_method` accepts only the members of
peft's own enumeration, so the name is written into the mappings which that function fills; the key is a plain string,
as in `adapter_config.json`, so saving and loading need nothing else.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from fastdp.validate import integer, one_of

PEFT_TYPE = "BOTTLENECK"

# The last matrix of a feed-forward block, under the names the architectures of transformers give it. One expression for
# all of them rather than a table by model type: a new model that keeps the naming of its family works unlisted.
FEED_FORWARD_OUTPUTS = (
    r"(.*\.)?("
    r"mlp\.c_proj|down_proj|fc2|fc_out|dense_4h_to_h|"  # GPT-2, Llama and its kin, OPT/BART/Phi/ViT, GPT-J, GPT-NeoX
    r"DenseReluDense\.wo|mlp\.Wo|ffn_output|ffn\.lin2|"  # T5, ModernBERT, ALBERT, DistilBERT
    r"layers?\.\d+\.output\.dense"  # BERT, RoBERTa, ELECTRA, DeBERTa
    r")"
)

NONLINEARITIES: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass
class BottleneckConfig(PeftConfig):
    """A bottleneck adapter after each feed-forward block, for `peft.get_peft_model`.

    The block's output h, [..., d], becomes h + up(f(down(h))) with down: d -> `bottleneck_size` and up back (Houlsby et
    al., arXiv 1902.00751; equation 6 of the federated selective paper). `up` starts at zero, so a fresh adapter leaves
    the model's outputs unchanged to the bit.

    Args:
        bottleneck_size: width of the bottleneck, at least 1.
        nonlinearity: one of "gelu", "relu", "silu", "tanh".
        target_modules: names or an expression of the linear layers whose output is adapted; by default the last matrix
            of every feed-forward block, found by name.
        modules_to_save: further modules to train and save whole, such as a new classification head.

    Raises:
        ValueError: for a width below 1 or an unknown nonlinearity.

    >>> BottleneckConfig(bottleneck_size=8, task_type="CAUSAL_LM").bottleneck_size
    8
    """

    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    bottleneck_size: int = 64
    nonlinearity: str = "gelu"
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PEFT_TYPE  # type: ignore[assignment]
        integer(1, bottleneck_size=self.bottleneck_size)
        one_of(tuple(NONLINEARITIES), nonlinearity=self.nonlinearity)
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)


class BottleneckLayer(nn.Module, BaseTunerLayer):
    """A linear layer followed by the active bottleneck adapters; input [..., n], output [..., d] as the layer's own."""

    adapter_layer_names = ("bottleneck_down", "bottleneck_up")
    other_param_names = ("nonlinearities",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: BottleneckConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.bottleneck_down = nn.ModuleDict()
        self.bottleneck_up = nn.ModuleDict()
        self.nonlinearities: dict[str, nn.Module] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        linear = self.get_base_layer()
        self.out_features = int(linear.nf if isinstance(linear, Conv1D) else linear.out_features)  # type: ignore[arg-type]
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BottleneckConfig) -> None:
        """Add an adapter of this name, initially the identity."""
        up = nn.Linear(config.bottleneck_size, self.out_features)
        nn.init.zeros_(up.weight)
        nn.init.zeros_(up.bias)
        self.bottleneck_down[adapter_name] = nn.Linear(self.out_features, config.bottleneck_size)
        self.bottleneck_up[adapter_name] = up
        self.nonlinearities[adapter_name] = NONLINEARITIES[config.nonlinearity]()
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output plus, for each active adapter in turn, its correction."""
        output = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return output
        dtype = output.dtype
        for name in self.active_adapters:
            if name in self.bottleneck_down:
                down, up = self.bottleneck_down[name], self.bottleneck_up[name]
                hidden = self.nonlinearities[name](down(output.to(down.weight.dtype)))
                output = output + up(hidden).to(dtype)
        return output

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: there is no single matrix to merge into."""
        raise ValueError(_NO_MERGE)

    def unmerge(self) -> None:
        """Nothing to undo, since nothing can be merged."""


_NO_MERGE = (
    "A bottleneck adapter cannot be merged: it has a nonlinearity between its matrices. Keep it loaded, or train LoRA."
)


class BottleneckModel(BaseTuner):
    """The tuner peft builds for a `BottleneckConfig`."""

    prefix = "bottleneck_"
    tuner_layer_cls = BottleneckLayer
    target_module_mapping: dict[str, list[str]] = {}

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        if peft_config.target_modules is None:
            peft_config.target_modules = FEED_FORWARD_OUTPUTS
        return peft_config

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, BottleneckLayer):
            target.update_layer(adapter_name, peft_config)
            return
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if not isinstance(base, (nn.Linear, Conv1D)):
            raise ValueError(
                f"a bottleneck adapter follows a linear layer, but target module {current_key} is a "
                f"{type(base).__name__}; name the last linear layer of each feed-forward block in target_modules"
            )
        layer = BottleneckLayer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _check_merge_allowed(self) -> None:
        raise ValueError(_NO_MERGE)


def train_biases_only(model: nn.Module, also: Collection[str] = ()) -> list[str]:
    """Make the biases of `model` its only trained parameters (BitFit, Ben Zaken et al., arXiv 2106.10199).

    A bias is a one-dimensional parameter whose name ends in "bias". `also` names modules to train whole, such as a new
    classification head, by their paths: every parameter below a path that ends so.

    Returns:
        The names of the trained parameters.

    Raises:
        ValueError: when the model has no bias, as Llama does not.
    """
    trained, biases = [], 0
    for name, parameter in model.named_parameters():
        is_bias = parameter.ndim == 1 and name.rpartition(".")[2] == "bias"
        keep = is_bias or any(f".{head}." in f".{name}" for head in also)
        parameter.requires_grad_(keep)
        biases += is_bias
        if keep:
            trained.append(name)
    if not biases:
        raise ValueError(
            f"{type(model).__name__} has no bias to train, so BitFit does not apply to it; "
            "train LoRA or a bottleneck instead"
        )
    return trained


def fix_lora_projections(model: nn.Module) -> list[str]:
    """Give every LoRA of `model` a frozen first matrix with orthonormal rows, so that its second one alone is trained.

    With W = W0 + s B A and A A^T = I the gradient of B is s G A^T, whose norm is that of s G A^T A, the change of the whole
    matrix. Clipping and noise thus act on that change, whatever the size of A and B (arXiv 2606.00944). With A frozen (arXiv
    2403.12313) only B gets noise, and no product of two noises arises. A is drawn from torch's generator, and public.

    Returns:
        The names of the frozen matrices.

    Raises:
        ValueError: for a model without LoRA, or with one whose rank is above the width that it reads.
    """
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        for adapters in (module.lora_A, module.lora_embedding_A):
            for key, first in dict[str, Any](adapters).items():
                weight: torch.Tensor = first if isinstance(first, nn.Parameter) else first.weight
                if weight.shape[0] > weight.shape[1]:
                    raise ValueError(
                        f"{name} has rank {weight.shape[0]} and reads {weight.shape[1]} numbers: lower the rank of LoRA to that"
                    )
                with torch.no_grad():
                    weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape)))
                weight.requires_grad_(False)
                found.append(f"{name}.{key}")
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no LoRA whose first matrix could be fixed: add one with peft first"
        )
    return found


PEFT_TYPE_TO_PREFIX_MAPPING[PEFT_TYPE] = BottleneckModel.prefix  # type: ignore[index]
PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = BottleneckConfig  # type: ignore[index]
PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE] = BottleneckModel  # type: ignore[index]
