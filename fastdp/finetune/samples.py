"""What the trained model says: texts of its own, or its answers to held-out examples beside the right ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from fastdp.calls.modes import in_mode
from fastdp.data import IGNORED, Collator, Examples
from fastdp.finetune.config import FinetuneConfig
from fastdp.finetune.evaluation import predict

_TOKENS = 48


def draw_samples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    collator: Collator,
    held_out: Examples | None,
    config: FinetuneConfig,
) -> dict[str, Any]:
    """``own``: texts that the model writes from nothing, which the guarantee covers as it covers the weights. Or, under
    ``unprotected``, held-out examples with the right answer and the model's: they show records.
    """
    device = next(model.parameters()).device
    with in_mode(model, training=False), torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(config.seed)
        has_prompts = config.prompt_column or (held_out is not None and IGNORED in held_out[0]["labels"])
        if config.task == "causal-lm" and not has_prompts:
            start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if start is None:
                return {"own": []}
            ids = torch.full((config.samples, 1), start, device=device)
            return {"own": _generated(model, tokenizer, ids, config, do_sample=True, top_p=0.9)}
        items = [] if held_out is None else [held_out[index] for index in range(min(config.samples, len(held_out)))]
        return {"unprotected": [_answered(model, tokenizer, collator, item, config, device) for item in items]}


def _generated(
    model: Any, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, config: FinetuneConfig, **how: Any
) -> list[str]:
    whole = config.task == "seq2seq"
    count = min(_TOKENS, config.max_length - (0 if whole else ids.shape[1]))
    return [""] * len(ids) if count < 1 else continue_texts(model, tokenizer, ids, whole, max_new_tokens=count, **how)


def continue_texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, ids: torch.Tensor, whole: bool = False, **how: Any
) -> list[str]:
    """What a model writes behind rows of tokens ``[rows, length]``, as text; ``how`` is for its method ``generate``.

    Args:
        whole: of an encoder and a decoder, whose answer does not repeat what was given.
    """
    mask = torch.ones_like(ids)
    found = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=tokenizer.pad_token_id, **how)
    # With soft prompts the answer comes without the tokens that were given.
    begin = 0 if whole or found.shape[1] <= ids.shape[1] else ids.shape[1]
    return [tokenizer.decode(row[begin:], skip_special_tokens=True).strip() for row in found]


def _answered(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    collator: Collator,
    item: dict[str, Any],
    config: FinetuneConfig,
    device: torch.device,
) -> dict[str, str]:
    def shown(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True).strip()

    if config.task in ("causal-lm", "seq2seq"):
        given, target = item["input_ids"], item["labels"]
        if config.task == "causal-lm":
            # Of a conversation the last answer.
            begin = max(place for place, label in enumerate(target) if label == IGNORED) + 1
            given, target = given[:begin], target[begin:]
        ids = torch.tensor([given], device=device)
        answer = _generated(model, tokenizer, ids, config, do_sample=False)[0]
        return {"text": shown(given), "right": shown(target), "answer": answer}
    logits, labels = predict(model, collator([item]), config.task, config.precision, device)
    names = config.labels or []
    if config.task == "regression":
        right, said = f"{float(labels[0]):.4g}", f"{float(logits.reshape(-1)[0]):.4g}"
    elif config.task == "multi-label":
        right, said = (
            ", ".join(name for name, chosen in zip(names, row) if chosen) or "none"
            for row in ((labels[0] > 0.5).tolist(), (logits[0] > 0).tolist())
        )
    else:
        known = labels.reshape(-1) != IGNORED
        rows = labels.reshape(-1)[known].tolist(), logits.argmax(-1).reshape(-1)[known].tolist()
        right, said = (" ".join(names[label] for label in row) for row in rows)
    return {"text": shown(item["input_ids"]), "right": right, "answer": said}
