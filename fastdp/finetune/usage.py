"""What a run leaves for others to use its model by: a tokenizer that encodes as training did, and a snippet of code."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import fastdp.files as files
from fastdp.accounting.card import hub_name
from fastdp.finetune.config import FinetuneConfig
from fastdp.finetune.models import ADAPTER_FOLDER
from fastdp.finetune.tasks import TASKS

#: Conversations of prompts and answers, as a run on prompt and target columns encodes them.
_PROMPTS = (
    "{%% for message in messages %%}{%% if loop.first or message['role'] == 'user' %%}{{ bos_token }}{%% endif %%}"
    "{{ message['content'] }}{%% if message['role'] == 'assistant' %%}{{ eos_token }}{%% else %%}{{ %s }}{%% endif %%}"
    "{%% endfor %%}"
)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def encodes_as_trained(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a causal model's tokenizer puts before a text what `fastdp.data.causal_examples` does, and nothing behind it."""
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return tokenizer("a")["input_ids"] == start + tokenizer("a", add_special_tokens=False)["input_ids"]


def tokenizer_to_save(
    tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig, *, chat: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer with which plain transformers encodes a prompt as training did.

    Args:
        tokenizer: the run's; it stays as it is.
        chat: whether the run trained on conversations, whose template says all.
    """
    if config.task != "causal-lm" or chat:
        return tokenizer
    saved = copy.deepcopy(tokenizer)
    if not encodes_as_trained(saved) and saved.is_fast:
        core = saved.backend_tokenizer  # type: ignore[attr-defined]
        core.post_processor = processors.Sequence([])
        if (start := saved.bos_token) is not None:
            core.post_processor = processors.TemplateProcessing(
                single=f"{start} $A", pair=f"{start} $A $B", special_tokens=[(start, saved.bos_token_id)]
            )
        # A model's own class would make its core anew when it is loaded.
        kept = {name: getattr(saved, name) for name in (*_SPECIAL, "chat_template", "model_max_length", "padding_side")}
        saved = PreTrainedTokenizerFast(tokenizer_object=core, **kept)
    if config.prompt_column:
        saved.chat_template = _PROMPTS % json.dumps(config.separator)
    return saved


def add_usage(folder: Path, config: FinetuneConfig, *, chat: bool) -> None:
    """Add to the README of a folder of weights, `save_weights`'s, how to load and ask the model."""
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8").rstrip("\n")
    code = "\n".join(_snippet(folder.name == ADAPTER_FOLDER, config, chat))
    files.write(page, f"{text}\n\n## Use\n\n{_advice(config, chat)}\n\n```python\n{code}\n```\n", public=True)


def _advice(config: FinetuneConfig, chat: bool) -> str:
    if chat:
        return "The tokenizer's chat template encodes conversations as training did."
    if config.task == "causal-lm":
        behind = f" Put {config.separator!r} behind each prompt." if config.prompt_column else ""
        return f"The tokenizer of this folder encodes a prompt as training did: the base model's may not.{behind}"
    return "The tokenizer of this folder encodes texts as training did."


def _snippet(adapted: bool, config: FinetuneConfig, chat: bool) -> list[str]:
    task = TASKS[config.task]
    auto = task.auto.__name__
    base = hub_name(str(config.model)) or "path/to/the/base/model"
    lines = ["import fastdp  # for its kind of adapter"] if config.peft == "bottleneck" else []
    lines += ["from peft import PeftModel"] if adapted else []
    lines += [f"from transformers import {auto}, AutoTokenizer", "", 'folder = "."  # where this page lies']
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"]
    if adapted:
        options = "".join(f", {name}={value!r}" for name, value in task.arguments(config).items())
        lines += [
            f"base = {auto}.from_pretrained({base!r}{options})",
            "model = PeftModel.from_pretrained(base, folder)",
        ]
        lines += ["base.config.pad_token_id = tokenizer.pad_token_id"] if task.problem else []
    else:
        lines += [f"model = {auto}.from_pretrained(folder)"]
    lines += ["model.eval()"]
    if chat:
        lines += [
            'messages = [{"role": "user", "content": "a question"}]',
            'inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        ]
    else:
        behind = f" + {config.separator!r}" if config.task == "causal-lm" and config.prompt_column else ""
        lines += [f'inputs = tokenizer("a text"{behind}, return_tensors="pt")']
    if config.task in ("causal-lm", "seq2seq"):
        given = "" if config.task == "seq2seq" else ', inputs["input_ids"].shape[1] :'
        lines += ["output = model.generate(**inputs, max_new_tokens=64)"]
        lines += [f"print(tokenizer.decode(output[0{given}], skip_special_tokens=True))"]
    else:
        lines += ["print(model(**inputs).logits)"]
    return lines
