"""What a run leaves is used by transformers and peft alone, as its own page says, and encodes as training did."""

import contextlib
import io
import json
import re
from dataclasses import replace

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

from fastdp.accounting import verify
from fastdp.data import IGNORED, Collator, causal_examples
from fastdp.finetune import finetune
from fastdp.finetune.evaluation import evaluate
from fastdp.finetune.tasks import encode_rows
from fastdp.finetune.usage import encodes_as_trained, tokenizer_to_save
from fastdp.tables import read_rows
from tests.finetune.runs import classify


def quickstart_core(model_folder):
    return transformers.AutoTokenizer.from_pretrained(model_folder).backend_tokenizer


def gpt2_class(model_folder):
    """A model's own class, which makes its core anew when it is loaded."""
    core = json.loads(quickstart_core(model_folder).to_str())["model"]
    return transformers.GPT2Tokenizer(core["vocab"], [tuple(pair) for pair in core["merges"]])


def ends_texts(model_folder):
    """One that puts its end token behind each text."""
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=quickstart_core(model_folder), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    return found


def without_begin_token(model_folder):
    core = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "text": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 1)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token="[SEP]")


def begins_texts(model_folder):
    """One that is right as it is, as Llama's."""
    return tokenizer_to_save(ends_texts(model_folder), NOTHING, chat=False)


NOTHING = type("Settings", (), {"task": "causal-lm", "prompt_column": None})()


@pytest.mark.parametrize(
    "make", [gpt2_class, ends_texts, without_begin_token, begins_texts], ids=lambda make: make.__name__
)
def test_a_saved_tokenizer_encodes_as_training_did(model_folder, config, tmp_path, make):
    tokenizer = make(model_folder)
    prompted = replace(config, prompt_column=["mr"], target_column="ref", separator=' = "\n')
    tokenizer_to_save(tokenizer, prompted, chat=False).save_pretrained(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert encodes_as_trained(loaded)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    (plain,) = causal_examples(tokenizer, ["a text"], 64)
    assert [*loaded("a text")["input_ids"], tokenizer.eos_token_id] == plain["input_ids"]
    (example,) = causal_examples(tokenizer, ["text"], 64, ["a text"], prompted.separator)
    given = example["input_ids"][: example["labels"].count(IGNORED)]
    assert loaded("a text" + prompted.separator)["input_ids"] == given
    turns = [{"role": "user", "content": "a text"}, {"role": "assistant", "content": "text"}]
    assert loaded.apply_chat_template(turns[:1], return_dict=False) == given
    assert loaded.apply_chat_template(turns, return_dict=False) == example["input_ids"]


def snippet(folder, base):
    """The page's code, as somebody in the folder would run it."""
    text = (folder / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text.partition("## Use")[2], re.DOTALL)[0]
    return code.replace('"."', repr(str(folder))).replace("path/to/the/base/model", str(base))


@pytest.mark.parametrize("kind", ["lora", "full", "bottleneck", "prompt"])
def test_the_page_of_a_causal_model_asks_it_as_training_did(config, files, model_folder, tmp_path, moved, kind):
    data = {"train": str(files / "pairs.csv"), "eval": str(files / "pairs.csv"), "text_column": None, "samples": 1}
    run = replace(config, **data, prompt_column=["mr"], target_column="ref", peft=kind, learning_rate=0.01)
    result = finetune(run)
    assert 0 < result.epsilon <= 8
    assert moved()
    folder = tmp_path / "run" / ("model" if kind in ("full", "bitfit") else "adapter")
    assert verify(folder / "README.md").guarantee
    table = read_rows(files / "pairs.csv")
    assert r"Put '\n' behind each prompt." in (folder / "README.md").read_text()
    # The tiny model has room for so many.
    code = snippet(folder, model_folder).replace("a text", table.rows[0]["mr"]).replace("=64", "=8")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = {}
        exec(code, found)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    examples = encode_rows(table, tokenizer, run)
    assert result.after.count == sum(len(each["labels"]) - each["labels"].count(IGNORED) for each in examples), (
        "the prompt's tokens are not scored"
    )
    again = evaluate(found["model"], examples, Collator(0), 5, "causal-lm")
    assert again.perplexity == pytest.approx(result.after.perplexity, rel=1e-5)
    example = examples[0]
    given = example["labels"].count(IGNORED)
    assert found["inputs"]["input_ids"][0].tolist() == example["input_ids"][:given]
    kept = json.loads((tmp_path / "run" / "samples.json").read_text())["unprotected"][0]["answer"]
    output = found["model"].generate(**found["inputs"], max_new_tokens=run.max_length - given, do_sample=False)
    written = output[0] if kind == "prompt" and output.shape[1] < given else output[0, given:]
    assert tokenizer.decode(written, skip_special_tokens=True).strip() == kept


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_page_of_a_classifier_runs(config, files, model_folder, tmp_path, kind):
    after = finetune(classify(config, files, peft=kind)).after
    assert 0 <= after.accuracy <= 1
    assert after.perplexity is None
    assert after.count == 48
    found = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(snippet(tmp_path / "run" / ("model" if kind == "full" else "adapter"), model_folder), found)
    assert found["model"](**found["inputs"]).logits.shape == (1, 2)
    assert set(found["model"].config.id2label.values()) == {"often", "seldom"}


def test_several_prompt_columns_are_joined_without_the_empty_ones(config, model_folder, tmp_path):
    path = tmp_path / "alpaca.json"
    rows = [
        {"instruction": "add", "input": "1 and 2", "output": "3"},
        {"instruction": "greet", "input": "", "output": "hello"},
    ]
    path.write_text(json.dumps(rows, indent=1))
    run = replace(config, train=str(path), prompt_column=["instruction", "input"], target_column="output")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    examples = encode_rows(read_rows(path), tokenizer, run)
    given = [[i for i, label in zip(e["input_ids"], e["labels"]) if label == IGNORED][1:] for e in examples]
    wanted = ["add\n1 and 2\n", "greet\n"]
    assert given == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in wanted]
