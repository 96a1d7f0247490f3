"""How the quickstart's public model was made: `python -m fastdp.quickstart.recipe OUTPUT` makes it again.

A GPT-2 of 4 layers, 128 wide, with a byte-level BPE of 1,536 tokens, trained from nothing on generated prose
(`corpus.public_text`) and on nothing else. It has never seen a patient's record: the words are
known to it, the form and the people are not.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY_SIZE = 1536
CONTEXT = 128
PARAGRAPHS = 24_000
PRETRAINING_BATCH = 32
STEPS = 600
# The generated prose is so regular that the model would become sure of itself, and absurdly wrong on anything else.
LABEL_SMOOTHING = 0.1
PEAK_LEARNING_RATE = 3e-3
SEED = 0


def train_tokenizer(paragraphs: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that any text at all can be encoded; the end-of-text token also pads."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(paragraphs, vocab_size=VOCABULARY_SIZE, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def train_model(tokens: torch.Tensor, steps: int) -> GPT2LMHeadModel:
    """Train on windows of `tokens`, int64 [n], drawn at random; Adam with a warm-up and a cosine decay."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        # The model is there to be fine-tuned for a few dozen steps: dropout would only blur the comparison.
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - CONTEXT, (PRETRAINING_BATCH,))
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        logits = model(input_ids=batch).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(logits, batch[:, 1:].flatten(), label_smoothing=LABEL_SMOOTHING)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
    return model


def main(output: Path, steps: int = STEPS) -> None:
    """Make the tokenizer and the model and write both to `output`, the weights in half precision."""
    from fastdp.quickstart.corpus import public_text

    paragraphs = public_text(PARAGRAPHS, SEED)
    tokenizer = train_tokenizer(paragraphs)
    encoded = tokenizer([END + paragraph for paragraph in paragraphs])["input_ids"]
    model = train_model(torch.tensor([token for ids in encoded for token in ids]), steps)
    tokenizer.save_pretrained(output)
    model.half().save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the quickstart's public model")
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    main(arguments.output, arguments.steps)
