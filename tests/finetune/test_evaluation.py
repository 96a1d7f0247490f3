"""How well a model does."""

import json
import math

import pytest
import torch
import transformers

from fastdp.data import Collator, causal_examples
from fastdp.finetune.evaluation import evaluate


def test_perplexity_is_the_token_mean_of_transformers(model_folder, files):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line)["text"] for line in (files / "text.jsonl").read_text().splitlines()]
    examples = causal_examples(tokenizer, texts, 48)
    total = count = 0
    for example in examples:
        batch = Collator(0)([example])
        with torch.no_grad():
            loss = model(**batch).loss.item()
        tokens = len(example["input_ids"]) - 1
        total, count = total + loss * tokens, count + tokens
    for batch_size in (1, 7, 48):
        quality = evaluate(model, examples, Collator(0), batch_size, "causal-lm")
        assert quality.count == count
        assert quality.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
