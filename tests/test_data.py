"""Rows in, examples and batches out."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

import fastdp.data
import fastdp.tables
from fastdp.data import IGNORED, Collator, causal_examples, classification_examples, sequence_examples
from tests.cases import cases


@pytest.fixture(scope="module")
def tokenizer():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["a text of little weight"], vocab_size=260, special_tokens=["<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<end>", eos_token="<end>", pad_token="<end>"
    )


def test_only_the_target_is_learned(tokenizer):
    (example,) = causal_examples(tokenizer, ["text"], 64, prompts=["weight"], separator=" = ")
    prompt = tokenizer("weight = ")["input_ids"]
    target = tokenizer("text")["input_ids"]
    end = tokenizer.eos_token_id
    assert example["input_ids"] == [end, *prompt, *target, end]
    assert example["labels"] == [IGNORED] * (1 + len(prompt)) + [*target, end]


def test_plain_text_is_learned_whole(tokenizer):
    (example,) = causal_examples(tokenizer, ["a text"], 64)
    assert example["labels"] == example["input_ids"]
    assert example["input_ids"][-1] == tokenizer.eos_token_id


@cases("ends", [False, True])
def test_a_target_ends_once_whether_its_tokenizer_says_so_or_not(tokenizer, ends):
    end = tokenizer.eos_token_id

    def ended(text=None, text_target=None, **options):
        made = tokenizer(text_target if text is None else text, **options)
        cut = options.get("max_length", 64) - 1
        return {"input_ids": [ids[:cut] + [end] for ids in made["input_ids"]]} if ends else made

    ended.eos_token_id = end
    (short,) = sequence_examples(ended, ["a text"], ["text"], 64)
    assert short["labels"] == [*tokenizer("text")["input_ids"], end]
    long = sequence_examples(ended, ["a text"], ["text of weight " * 9], 8)
    assert long.truncated == 1
    assert len(long[0]["labels"]) == 8
    assert long[0]["labels"].count(end) == 1
    assert long[0]["labels"][-1] == end


@settings(max_examples=200)
@given(
    prompt=st.text(alphabet="abc ", max_size=60), target=st.text(alphabet="xyz ", max_size=60), limit=st.integers(4, 40)
)
def test_cutting_keeps_to_the_limit_and_leaves_something_to_learn(tokenizer, prompt, target, limit):
    examples = causal_examples(tokenizer, [target], limit, prompts=[prompt])
    (example,) = examples
    assert len(example["input_ids"]) == len(example["labels"]) <= limit
    learned = [label for label in example["labels"] if label != IGNORED]
    whole = [*tokenizer(target)["input_ids"], tokenizer.eos_token_id]
    assert learned
    assert learned == whole[: len(learned)]
    if not examples.truncated:
        assert learned == whole


def test_classification_examples(tokenizer):
    examples = classification_examples(tokenizer, ["a text", "li"], [1, 0], 5, pairs=["of weight", "a"])
    assert examples.truncated == 1
    assert len(examples[0]["input_ids"]) == 5
    assert [example["labels"] for example in examples] == [1, 0]
    assert examples.lengths == [len(example["input_ids"]) for example in examples]


def test_collator_masks_padding_and_not_the_end_token_that_looks_like_it(tokenizer):
    pad = tokenizer.pad_token_id
    examples = causal_examples(tokenizer, ["a text", "a text of little weight"], 64)
    batch = Collator(pad)([examples[0], examples[1]])
    short, long = len(examples[0]["input_ids"]), len(examples[1]["input_ids"])
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape == (2, long)
    assert batch["attention_mask"].sum(1).tolist() == [short, long]
    assert batch["input_ids"][0, short - 1] == pad
    assert batch["labels"][0, short - 1] == pad
    assert (batch["labels"][0, short:] == IGNORED).all()
    assert (batch["input_ids"][0, short:] == pad).all()


def test_collator_on_classification(tokenizer):
    examples = classification_examples(tokenizer, ["a text", "little"], [1, 0], 8)
    batch = Collator(0)(list(examples))
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))


def test_tables_are_read_under_the_names_they_had():
    assert all(
        getattr(fastdp.data, name) is getattr(fastdp.tables, name) for name in ("DataError", "Rows", "read_rows")
    )
