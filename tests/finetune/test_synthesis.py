"""Synthetic rows: from prompts and without, different from each other, covered by a card; near-copies; the judge."""

import dataclasses
import json

import pytest
import torch
import transformers

from fastdp.accounting import Card, verify
from fastdp.audit.saved import load_saved
from fastdp.finetune import ConfigError, FinetuneConfig, finetune
from fastdp.finetune.synthesis import Judge, TokenSampling, near_copies, synthesize
from fastdp.tables import DataError, read_rows
from tests.cases import cases
from tests.test_cli import refused, told


@pytest.fixture(scope="module")
def trained(model_folder, files, tmp_path_factory):
    """A run that learned the target from the prompt, and one that learned whole texts."""
    folder = tmp_path_factory.mktemp("runs")
    common = FinetuneConfig(
        model=str(model_folder), epsilon=8.0, delta=1e-3, max_length=32, epochs=1, batch_size=16, lora_r=2, samples=0
    )
    prompted = dataclasses.replace(
        common,
        train=str(files / "pairs.csv"),
        prompt_column=["mr"],
        target_column="ref",
        output=str(folder / "prompted"),
    )
    plain = dataclasses.replace(common, train=str(files / "text.jsonl"), output=str(folder / "plain"))
    for config in (prompted, plain):
        finetune(config)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.csv"
    path.write_text("mr\nfirst prompt\nsecond prompt\nfirst prompt\n")
    return path


def test_each_prompt_gets_as_many_different_texts(trained, prompts):
    found = list(synthesize(*load_saved(trained / "prompted"), read_rows(prompts), 5, TokenSampling(batch_size=3)))
    assert [row["mr"] for row in found] == ["first prompt"] * 5 + ["second prompt"] * 5
    assert len({(row["mr"], row["ref"]) for row in found}) == 10
    assert all(row["ref"] for row in found)


def test_what_the_model_is_given_is_what_training_gave_it(trained, prompts, monkeypatch):
    model, tokenizer, config = load_saved(trained / "prompted")
    given = []
    draw = model.generate
    monkeypatch.setattr(model, "generate", lambda **how: given.append(how["input_ids"][0].tolist()) or draw(**how))
    list(synthesize(model, tokenizer, config, read_rows(prompts), 1, TokenSampling()))
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    assert given[0] == start + tokenizer("first prompt\n", add_special_tokens=False)["input_ids"]


def test_a_seed_gives_the_same_rows_and_leaves_random_states_alone(trained):
    loaded = load_saved(trained / "plain")
    state = torch.get_rng_state()
    one, two, other = (list(synthesize(*loaded, None, 3, TokenSampling(seed=seed))) for seed in (1, 1, 2))
    assert one == two != other
    assert list(one[0]) == ["text"]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_repeats_itself_gives_fewer_rows(trained):
    assert len(list(synthesize(*load_saved(trained / "plain"), None, 4, TokenSampling(top_p=1e-6, seed=3)))) < 4


@pytest.mark.parametrize(
    ("which", "given", "changes", "named"),
    [
        ("prompted", False, {}, "--prompts"),
        ("plain", True, {}, "leave --prompts out"),
        ("plain", False, {"task": "classification"}, "classification"),
        ("plain", False, {"messages_column": "messages"}, "conversations"),
    ],
)
def test_what_does_not_fit_is_refused(trained, prompts, which, given, changes, named):
    model, tokenizer, config = load_saved(trained / which)
    config, table = dataclasses.replace(config, **changes), read_rows(prompts) if given else None
    with pytest.raises(ConfigError, match=named):
        synthesize(model, tokenizer, config, table, 1, TokenSampling())


def test_a_prompt_file_without_the_column_is_named(trained, files):
    with pytest.raises(DataError, match="'mr'"):
        synthesize(*load_saved(trained / "prompted"), read_rows(files / "text.jsonl"), 1, TokenSampling())


@cases("changes", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"batch_size": 0}])
def test_sampling_is_checked(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        TokenSampling(**changes)


def test_near_copies_are_words_in_a_row():
    records = ["one two three four five six seven eight nine"]
    texts = ["x Two three FOUR five six seven eight nine", "one two three four five six seven", "nine eight seven"]
    assert near_copies(texts, records) == [0]
    assert near_copies(texts, []) == []


def test_the_judge_learns_from_rows_and_is_tested_on_others(tmp_path, model_folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path)
    transformers.GPT2Model(transformers.AutoConfig.from_pretrained(model_folder)).save_pretrained(tmp_path)
    texts = [f"{word} {number}" for number in range(20) for word in ("takes", "never")]
    labels = ["yes", "no"] * 20
    judge = Judge(tmp_path, (texts[20:], labels[20:]))
    assert judge.accuracy((texts[:20], labels[:20])) > 0.9
    with pytest.raises(ValueError, match="1 label"):
        judge.accuracy((texts[::2], labels[::2]))
    mixed = ["takes", "never takes a long time to say so", "never 1"]
    alone = torch.cat([judge.features([text]) for text in mixed])
    assert torch.allclose(judge.features(mixed, batch_size=2), alone, atol=1e-5)


def test_the_command_writes_rows_and_a_card_that_holds(trained, prompts, files, tmp_path):
    output = tmp_path / "synthetic.jsonl"
    arguments = ("synthesize", trained / "prompted", "--output", output, "--prompts", prompts)
    assert "unprotected" in told(*arguments, "--count", 3, "--train", files / "pairs.csv")
    assert len([json.loads(line) for line in output.read_text().splitlines()]) == 6
    card = tmp_path / "synthetic.card.json"
    assert verify(card)
    assert Card.load(card)["synthetic"]["rows"] == 6
    assert Card.load(card)["run_id"] == Card.load(trained / "prompted" / "card.json")["run_id"]


def test_the_command_draws_on_a_gpu_where_there_is_one(trained, prompts, tmp_path, monkeypatch):
    """The device ``meta`` stands in for it: weights and prompts are there when a text is drawn."""
    asked, seen = [], []

    def generate(model, input_ids, attention_mask, **_):
        seen.append({tensor.device.type for tensor in (input_ids, attention_mask, *model.parameters())})
        return torch.arange(len(input_ids) * (input_ids.shape[1] + 4)).view(len(input_ids), -1)

    monkeypatch.setattr("fastdp.validate.usable_device", lambda name: asked.append(name) or torch.device("meta"))
    monkeypatch.setattr(transformers.GenerationMixin, "generate", generate)
    output = tmp_path / "synthetic.jsonl"
    assert told("synthesize", trained / "prompted", "--output", output, "--prompts", prompts, "--count", 2)
    assert asked == ["auto"]
    assert seen == [{"meta"}] * len(seen) != []


def test_a_run_whose_card_does_not_hold_writes_nothing(trained, tmp_path):
    output = tmp_path / "synthetic.jsonl"
    assert "has no card.json" in refused("synthesize", tmp_path, "--output", output)
    assert "there is no folder" in refused("synthesize", tmp_path / "absent", "--output", output)
    assert not output.exists()
