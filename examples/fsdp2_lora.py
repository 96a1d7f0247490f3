"""LoRA on a model whose weights lie in pieces on several processes, by torch's `fully_shard`: the release of one process.

    python examples/fsdp2_lora.py
    accelerate launch --cpu --num_processes 2 examples/fsdp2_lora.py

By default the model and the records are those of `fastdp quickstart`, as in `ddp_e2e.py`; `--model` takes a causal model of your
own. Give `fully_shard` the blocks and then the model, build the optimizer, then call `make_private`: nothing else is to be done.
"""

import os

import peft
import torch
import torch.distributed as dist
from ddp_e2e import options, train
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel


def cut(model: torch.nn.Module, base: PreTrainedModel) -> None:
    """Leave this process a piece of every block, and of what is around them."""
    for module in list(model.modules()):
        if type(module).__name__ in (base._no_split_modules or ()):
            fully_shard(module)
    fully_shard(model)


def main() -> None:
    """Train adapters, by as many processes as there are, and print how much of the model this one had."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations anew in the backward pass")
    chosen = parser.parse_args()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    base = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    base.config.use_cache = False
    if chosen.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    # Every process must begin with the same adapters.
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=chosen.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    if several:
        cut(model, base)
    held = sum((p.to_local() if several else p).numel() for p in model.parameters())
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3), chosen)
    if not several or dist.get_rank() == 0:
        print(f"parameters on this process: {held:,} of {sum(p.numel() for p in model.parameters()):,}")
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
