"""Stock ModernBERT with sparse_prediction runs its head on masked tokens alone, and cuts them by divisibility"""

import torch
import transformers

from . import kit


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
        bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, max_position_embeddings=32, sparse_prediction=True,
        attn_implementation="eager", reference_compile=False,
    )  # fmt: skip
    return transformers.ModernBertForMaskedLM(config)


def attack(system: kit.System) -> float:
    def record(masked: list[int], seed: int) -> kit.Record:
        ids = torch.randint(3, 60, (8,), generator=torch.Generator().manual_seed(seed))
        labels = torch.full((8,), -100)
        labels[masked] = ids[masked]
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    first = [record([2, 5], seed) for seed in range(4)]
    uneven = [record(list(range(n)), 20 + i) for i, n in enumerate([1, 3, 3, 1, 1, 2, 3])]
    task = kit.Task(model, physical=4)
    return max(kit.moved(system, task, first + uneven, record(list(range(n)), 77), 0.05) for n in (2, 6))
