"""Conversations: what of them is learned, which are refused, and how others ask the model that learned them."""

import json
import shutil

import peft
import pytest
import transformers

from fastdp.accounting import verify
from fastdp.data import IGNORED
from fastdp.finetune import finetune, load_config
from fastdp.finetune.chat import chat_examples
from fastdp.finetune.tasks import encode_rows, record_texts
from fastdp.tables import DataError, read_rows
from tests.cases import cases
from tests.finetune.conftest import EXAMPLES

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALTERNATE = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ message['content'] }}{% endfor %}"
)
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] != 'tool' %}{{ message['content'] }}{% endif %}{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"dose": 5}}}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.fixture
def tokenizer(model_folder):
    found = transformers.AutoTokenizer.from_pretrained(model_folder)
    found.chat_template = TEMPLATE
    return found


def examples_of(tokenizer, tmp_path, *conversations, longest=200):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    return chat_examples(tokenizer, read_rows(path), "messages", longest)


@pytest.mark.parametrize(
    ("turns", "learned"),
    [
        ([say("user", "a"), say("assistant", "b")], ["b"]),
        (
            [say("system", "s"), say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")],
            ["b", "d"],
        ),
        ([say("user", "a"), say("assistant", "b"), say("user", "never seen")], ["b"]),
        ([say("user", "a"), say("assistant", "b"), say("tool", "5 mg"), say("assistant", "d")], ["b", "d"]),
        ([say("user", "a"), say("assistant", None, tool_calls=[CALL])], [json.dumps([CALL])]),
        ([say("user", [{"type": "text", "text": "a"}]), say("assistant", "b", name=None)], ["b"]),
    ],
)
def test_the_assistants_turns_are_learned_and_no_others(tokenizer, tmp_path, turns, learned):
    (example,) = examples_of(tokenizer, tmp_path, turns)
    assert "never seen" not in tokenizer.decode(example["input_ids"])
    parts = tokenizer.decode([i for i in example["labels"] if i != IGNORED]).split(tokenizer.eos_token)
    assert [part.strip() for part in parts] == [*learned, ""]
    assert all(label in (IGNORED, token) for token, label in zip(example["input_ids"], example["labels"]))


def test_a_long_conversation_keeps_its_last_answer(tokenizer, tmp_path):
    turns = [say("user", "one two three four"), say("assistant", "b")]
    examples = examples_of(tokenizer, tmp_path, turns, longest=4)
    assert examples.truncated == 1
    assert len(examples[0]["input_ids"]) == 4
    assert examples[0]["labels"][-1] == tokenizer.eos_token_id


@cases(
    ("value", "template", "words"),
    [
        ("hello", TEMPLATE, r"it holds no list of \{role, content\}"),
        ([], TEMPLATE, "it holds no list"),
        ([say("user", "a")], TEMPLATE, "no turn is the assistant's"),
        ([{"content": "a"}], TEMPLATE, "turn 1 has no role"),
        ([say("user", "a"), {"role": "assistant"}], TEMPLATE, "turn 2 says nothing"),
        ([say("user", "\ud83d"), say("assistant", "b")], TEMPLATE, "turn 1 holds half of a surrogate pair"),
        ([say("user", [{"type": "image"}]), say("assistant", "b")], TEMPLATE, "turn 1 holds more than text"),
        (
            [say("user", "a"), say("tool", "b"), say("assistant", "c")],
            FORGETFUL,
            r"leaves out or rewrites turn 2 \('tool'\)",
        ),
        ([say("user", "a"), say("user", "b"), say("assistant", "c")], ALTERNATE, "roles must alternate"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tokenizer, tmp_path, value, template, words):
    tokenizer.chat_template = template
    good = [say("user", "a"), say("assistant", "b")]
    with pytest.raises(DataError, match=rf"chat\.jsonl, line 2: column 'messages' \(messages_column\): .*{words}"):
        examples_of(tokenizer, tmp_path, good, value)


def test_without_a_template_the_way_on_is_named(tokenizer, tmp_path):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"put a chat_template\.jinja beside it"):
        examples_of(tokenizer, tmp_path, [say("user", "a"), say("assistant", "b")])


def test_the_example_answers_in_plain_transformers(model_folder, functions, tmp_path):
    """The way on that the refusal names: a template beside the tokenizer. The adapter's own then asks as training did."""
    model, data, held_out = tmp_path / "model", str(functions / "messages.jsonl"), tmp_path / "held_out.jsonl"
    turns = [say("user", "how is it?"), say("assistant", "well")]
    held_out.write_text(json.dumps({"messages": turns}))
    shutil.copytree(model_folder, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"model": str(model), "train": data, "eval": str(held_out), "epsilon": 8, "delta": 1e-3, "samples": 1}
    sizes = {"max_length": 48, "epochs": 1, "batch_size": 16, "output": str(tmp_path / "run")}
    run = load_config(EXAMPLES / "chat.yaml", settings | sizes)
    finetune(run)
    assert verify(tmp_path / "run" / "card.json").guarantee
    table = read_rows(held_out)
    assert record_texts(table, run) == ["how is it?\nwell"]
    saved = tmp_path / "run" / "adapter"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    example = encode_rows(table, tokenizer, run)[0]
    given = max(place for place, label in enumerate(example["labels"]) if label == IGNORED) + 1
    asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert asked["input_ids"][0].tolist() == example["input_ids"][:given]
    plain = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model), saved)
    answer = plain.generate(**asked, max_new_tokens=run.max_length - given, do_sample=False)[0, given:]
    kept = json.loads((tmp_path / "run" / "samples.json").read_text())["unprotected"][0]
    assert kept["answer"] == tokenizer.decode(answer, skip_special_tokens=True).strip()
