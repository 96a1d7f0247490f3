"""How far the length of one record moves the clipped sum of the others (docs/clipping.md, "What remains").

``python -m bench.shapes [--json PATH]``: 64 texts of 8 tokens, and one of 8 to 63, whose own gradient weighs nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import fastdp
from fastdp.data import Collator
from fastdp.private.observer import Observer

from . import record

OTHERS, LENGTH, LONGER, BOUND = 64, 8, (9, 15, 24, 48, 63), 0.1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SIZE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}
_DROPOUT: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "gpt2": lambda layers: GPT2LMHeadModel(GPT2Config(**_SIZE, **_DROPOUT, num_hidden_layers=layers)),
    "llama": lambda layers: LlamaForCausalLM(LlamaConfig(**_SIZE, intermediate_size=256, num_hidden_layers=layers)),
}


class _Sums(Observer):
    def before_release(self, accumulator: Any) -> None:
        self.sums = torch.cat([total.flatten().double() for total in accumulator.sums.values()])


def _sum_of_others(model: nn.Module, texts: Any, shapes: str | None) -> torch.Tensor:
    """The clipped sum of one step, to which the last text adds nothing."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    loader: Any = torch.utils.data.DataLoader(texts, batch_size=len(texts), collate_fn=Collator(0))
    private = fastdp.make_private(
        *(model, optimizer, loader), method=fastdp.DPSGD(max_grad_norm=BOUND), noise_multiplier=0.0, target_delta=1e-3,
        epochs=1, unsafe_seed=0, self_check=False, shapes=shapes,
    )  # fmt: skip
    private.observe(seen := _Sums())
    for batch in private.data_loader:
        ticket = private.data_loader.tickets[-1]
        others = torch.tensor([index < OTHERS for index in ticket.source.indices])
        private.data_loader.tickets[-1] = dataclasses.replace(ticket, weights=ticket.weights * others)
        private.model(**batch).loss.backward()
        private.optimizer.step()
    private.detach()
    return seen.sums


def moved(model: str, layers: int, dtype: str, *, equal: bool, shapes: str | None = None) -> float:
    """The largest movement in units of the bound, over lengths of the last text; the others may be one text."""
    sums = []
    for length in (LENGTH, *LONGER):
        torch.manual_seed(0)
        own = MODELS[model](layers).to(DTYPES[dtype])
        ids = torch.randint(1, _SIZE["vocab_size"], (1 if equal else OTHERS, LENGTH)).expand(OTHERS, -1).tolist()
        ids.append(torch.randint(1, _SIZE["vocab_size"], (length,)).tolist())
        sums.append(_sum_of_others(own, [{"input_ids": text, "labels": text} for text in ids], shapes))
    return max(float((other - sums[0]).norm()) / BOUND for other in sums[1:])


if __name__ == "__main__":
    options, rows = record.parser_of(__doc__).parse_args(), []
    for name, depth, precision, alike in itertools.product(MODELS, (2, 12), DTYPES, (False, True)):
        found = {
            f"{own or 'own'} shapes": moved(name, depth, precision, equal=alike, shapes=own) for own in (None, "public")
        }
        rows.append({"model": name, "layers": depth, "dtype": precision, "equal": alike, **found})
        record.write(options.json, rows)
