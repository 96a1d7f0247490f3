"""Stock Phi-3 and Llama whose position embeddings stretch: a long record moves its batch's others, and in Llama later ones"""

import functools
from typing import Any

import torch
import transformers

from . import kit, systems

_SMALL = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50},
    "initializer_range": 0.3,
}


def phi() -> torch.nn.Module:
    torch.manual_seed(0)
    factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
    sizes: dict[str, Any] = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "pad_token_id": 0}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SMALL, **sizes, rope_scaling=factors))


def llama() -> torch.nn.Module:
    torch.manual_seed(0)
    stretched = {"rope_type": "dynamic", "factor": 4.0}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**_SMALL, max_position_embeddings=16, rope_scaling=stretched)
    )


def attack(library: systems.FastDP) -> float:
    late = functools.partial(kit.beside_a_late, library)
    (before,), (after,) = kit.tokens(1, [9]), kit.tokens(1, [30])
    moved = [late(kit.Task(make, collate=kit.padded), kit.tokens(16, [5, 8]), before, after) for make in (phi, llama)]
    return max(*moved, late(kit.Task(llama, collate=kit.padded), kit.tokens(16, [18, 21]), before, after))
