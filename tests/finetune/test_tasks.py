"""A run of every task on a tiny random model: trained in private, written, loaded by peft or transformers alone, and used."""

import json
import math
from importlib import resources

import peft
import pytest
import torch
import transformers
import transformers as hf
from tokenizers.processors import TemplateProcessing

from fastdp.data import Collator, causal_examples, word_examples
from fastdp.finetune import ConfigError, FinetuneConfig, finetune
from fastdp.finetune.config import CHOICES
from fastdp.finetune.evaluation import Quality, evaluate
from fastdp.finetune.models import check_model_name, load_trained
from fastdp.finetune.tasks import TASKS, encode_rows, invented_label, record_texts, task_of
from fastdp.quickstart.corpus import private_records
from fastdp.tables import DataError, Rows, read_rows
from tests.cases import cases

ROWS = 48
QUICKSTART = str(resources.files("fastdp.quickstart") / "model")


@pytest.fixture(scope="module")
def tokenizer():
    """The quickstart's, which ends each text with its end token and pads with another."""
    found = hf.AutoTokenizer.from_pretrained(QUICKSTART)
    ends = TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A <|endoftext|> $B <|endoftext|>",
        special_tokens=[("<|endoftext|>", found.eos_token_id)],
    )
    found._tokenizer.post_processor = ends
    found.add_special_tokens({"pad_token": "<pad>"})
    return found


@pytest.fixture(scope="module")
def models(tokenizer, tmp_path_factory):
    """A folder with a tiny random model of each kind."""
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    ends = {**ids, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, model in {
        "t5": hf.T5ForConditionalGeneration(hf.T5Config(**t5, **ends)),
        "bart": hf.BartForConditionalGeneration(
            hf.BartConfig(d_model=32, max_position_embeddings=64, forced_eos_token_id=0, **sides, **ends)
        ),
        "bert": hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=64, **bert, **ids)),
        "gpt2": hf.GPT2LMHeadModel(
            hf.GPT2Config(
                n_layer=2, n_embd=32, n_head=2, n_positions=64, **(ids | {"bos_token_id": 0, "eos_token_id": 0})
            )
        ),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Records with labels of every kind."""
    path = tmp_path_factory.mktemp("data") / "records.jsonl"
    with open(path, "w") as file:
        for record in private_records(ROWS, seed=1):
            words = record.split()
            source, target = record.split(". ", 1)
            row = {
                "text": record,
                "words": words,
                "tags": ["NAME" if word[0].isupper() else "O" for word in words],
                "length": len(words) / 10,
                "kinds": [kind for kind in ("twice", "daily") if kind in record],
                "source": source,
                "target": target,
                "label": "often" if "twice" in record else "seldom",
            }
            file.write(json.dumps(row) + "\n")
    return path


SETTINGS = {
    "causal-lm": {"text_column": "text"},
    "seq2seq": {"prompt_column": "source", "target_column": "target"},
    "classification": {"text_column": "text", "labels": ["often", "seldom"]},
    "multi-label": {"text_column": "text", "label_column": "kinds", "labels": ["twice", "daily"]},
    "regression": {"text_column": "text", "label_column": "length"},
    "token-classification": {"text_column": "words", "label_column": "tags", "labels": ["O", "NAME"]},
}


def settings(models, table, output, model, task, **others):
    return FinetuneConfig(
        **{
            **{"model": str(models / model), "train": str(table), "eval": str(table), "output": str(output)},
            **{"task": task, "epsilon": 8.0, "delta": 1e-3, "max_length": 40, "epochs": 1, "batch_size": 24},
            **{"physical_batch_size": 8, "learning_rate": 0.01, "lora_r": 2, "bottleneck_size": 4, "prompt_tokens": 3},
            **SETTINGS[task],
            **others,
        }
    )


def reloaded(config, task):
    """The model as somebody without fastdp would load it, with another seed for what was not saved."""
    arguments = TASKS[task].arguments(config)
    torch.manual_seed(99)
    if config.peft in ("full", "bitfit"):
        return TASKS[task].auto.from_pretrained(f"{config.output}/model")
    base = TASKS[task].auto.from_pretrained(config.model, dtype=torch.float32, **arguments)
    base.config.pad_token_id = base.config.pad_token_id or 0
    return peft.PeftModel.from_pretrained(base, f"{config.output}/adapter")


KINDS = ("full", "lora", "dora", "bitfit", "ia3", "prompt")
DEFAULT = [
    ("t5", "seq2seq", "lora"),
    ("gpt2", "regression", "dora"),
    ("bert", "token-classification", "full"),
]
MODELS = {"seq2seq": ("t5", "bart"), "causal-lm": ("gpt2",)}
#: T5 has no biases, encoders and decoders classify without soft prompts, and words' labels are not moved behind them.
NONE = {("t5", "bitfit"), ("token-classification", "prompt")}
MORE = [
    pytest.param(model, task, kind, marks=pytest.mark.slow)
    for task in TASKS
    for model in MODELS.get(task, ("bert", "gpt2"))
    for kind in KINDS
    if (model, task, kind) not in DEFAULT and not {(model, kind), (task, kind)} & NONE
]


@pytest.mark.parametrize(("model", "task", "kind"), DEFAULT + MORE)
def test_a_run_trains_and_loads_elsewhere(models, table, tokenizer, tmp_path, moved, model, task, kind):
    config = settings(models, table, tmp_path / "run", model, task, peft=kind)
    result = finetune(config)
    assert 0 < result.epsilon <= 8
    assert moved()
    plain = reloaded(config, task).eval()
    examples = encode_rows(read_rows(table), tokenizer, config)
    again = evaluate(plain, examples, Collator(tokenizer.pad_token_id), 7, task)
    assert again.loss == pytest.approx(result.after.loss, rel=1e-4)
    assert again.figure == (result.after.figure[0], pytest.approx(result.after.figure[1], rel=1e-3))
    batch = Collator(tokenizer.pad_token_id)([examples[0], examples[1]])
    if task in ("seq2seq", "causal-lm"):
        prompt = {name: batch[name] for name in ("input_ids", "attention_mask")}
        assert plain.generate(**prompt, max_new_tokens=3, do_sample=False).shape[0] == 2
        return
    del batch["labels"]
    width = {"regression": 1}.get(task, 2)
    assert plain(**batch).logits.shape[-1] == width


@pytest.mark.slow
def test_private_gradients_teach(models, table, tmp_path):
    """Enough steps at a small noise move every task's loss towards what plain training finds."""
    config = settings(models, table, tmp_path / "run", "gpt2", "regression", epsilon=1e4, epochs=4, peft="full")
    result = finetune(config)
    assert result.after.rmse < 0.8 * result.before.rmse


def test_every_task_is_in_every_table(models, table, tokenizer):
    assert set(TASKS) == set(CHOICES["task"]) == set(SETTINGS)
    for task in TASKS:
        model = MODELS.get(task, ("bert",))[0]
        config = settings(models, table, "unused", model, task)
        rows = read_rows(table)
        item = encode_rows(rows, tokenizer, config)[0]
        label = invented_label(config, item["input_ids"], 1)
        assert type(label) is type(item["labels"])
        assert len(record_texts(rows, config)) == ROWS
        settings_of_model = load_trained(config, tokenizer).config
        settings_of_model.architectures = [TASKS[task].heads[type(settings_of_model)].__name__]
        assert task_of(settings_of_model) == task


def test_a_new_pooler_is_trained_and_saved_with_the_head(models, table, tokenizer):
    """A masked language model has none, so a classifier's would be random after loading if the adapter did not hold it."""
    model = load_trained(settings(models, table, "unused", "bert", "classification"), tokenizer)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}
    assert {part for part in ("pooler", "classifier") if any(part in name for name in trained)} == {
        "pooler",
        "classifier",
    }


def test_the_first_token_of_a_word_carries_its_label(tokenizer):
    words = [["Anselm", "takes", "drops"], ["a"], ["one", "", "two"]]
    examples = word_examples(tokenizer, words, [[1, 0, 2], [2], [1, 0, 2]], 64)
    for item, row, labels in zip(examples.items, words, ([1, 0, 2], [2], [1, 2])):
        carried = [(token, label) for token, label in zip(item["input_ids"], item["labels"]) if label >= 0]
        assert [label for _, label in carried] == labels
        for (token, _), word in zip(carried, filter(None, row)):
            piece = tokenizer.decode([token]).strip()
            assert word.startswith(piece)
        assert item["labels"][-1] == -100, "the end token is no word"
    cut = word_examples(tokenizer, words, [[1, 0, 2], [2], [1, 0, 2]], 4)
    assert cut.truncated == 1
    assert max(cut.lengths) == 4
    assert all(len(item["labels"]) == len(item["input_ids"]) for item in cut.items)


def test_quality_of_labels_and_numbers():
    class Fixed(torch.nn.Module):
        def __init__(self, logits, label2id=None):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.tensor(logits))
            names = {number: name for name, number in (label2id or {}).items()}
            self.config = hf.PretrainedConfig(**({"id2label": names, "label2id": label2id} if label2id else {}))

        def forward(self, input_ids, attention_mask):
            return hf.modeling_outputs.SequenceClassifierOutput(logits=self.logits)

    def quality(logits, labels, task, **options):
        items = [{"input_ids": [1, 2, 3], "labels": label} for label in labels]
        examples = type("E", (), {"__len__": lambda _: len(items), "__getitem__": lambda _, i: items[i]})()
        return evaluate(Fixed(logits, **options), examples, Collator(0), 8, task)

    found = quality([[1.0, -1.0], [2.0, 2.0]], [(1.0, 0.0), (0.0, 1.0)], "multi-label")
    assert (found.accuracy, found.f1, found.count) == (0.75, pytest.approx(2 * 2 / (3 + 2)), 4)
    found = quality([[1.0], [3.0]], [1.5, 1.0], "regression")
    assert found == Quality(pytest.approx(2.125), 2, rmse=pytest.approx(math.sqrt(2.125)))
    # Words: O right, NAME right, NAME found where O was; the first token of the second is no word's.
    logits = [[[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]], [[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]]]
    labels = [[0, 1, 0], [-100, 0, 0]]
    found = quality(logits, labels, "token-classification", label2id={"O": 0, "NAME": 1})
    assert (found.accuracy, found.f1, found.count) == (0.8, pytest.approx(2 * 1 / (2 + 1)), 5)


@cases(
    ("task", "row", "words"),
    [
        ("regression", {"text": "a", "length": "tall"}, "label 'tall' is not a number"),
        ("regression", {"text": "a", "length": "1e39"}, "label '1e39' is not a number of float32"),
        ("regression", {"text": "a", "length": math.inf}, "holds the number inf, which is not finite"),
        ("multi-label", {"text": "a", "kinds": "twice, weekly"}, "label 'weekly' is not one of labels: twice, daily"),
        ("multi-label", {"text": "a", "kinds": [["twice"]]}, "a list of more than words"),
        ("multi-label", {"text": "a", "kinds": "[twice"}, "not a list"),
        ("token-classification", {"words": ["a", "b"], "tags": ["O"]}, "2 words and 1 labels"),
        ("token-classification", {"words": "a b", "tags": "O X"}, "label 'X' is not one of labels"),
        ("token-classification", {"words": [], "tags": []}, "empty"),
        ("causal-lm", {"text": ""}, None),
    ],
)
def test_rows_that_do_not_fit_name_their_line(models, table, tokenizer, task, row, words):
    config = settings(models, table, "unused", "bert", task)
    rows = Rows(table, {name: [value] for name, value in row.items()}, [7])
    if words is None:
        assert len(encode_rows(rows, tokenizer, config)[0]["input_ids"]) > 0
        return
    if words == "empty":
        tokenizer = hf.AutoTokenizer.from_pretrained(QUICKSTART)
    with pytest.raises(DataError, match=f"line 7: .*{words}"):
        encode_rows(rows, tokenizer, config)


def test_a_text_that_spells_out_the_end_is_refused_where_the_model_looks_for_it(models, table, tokenizer):
    """Such models raise in the middle of training otherwise, when the row is first drawn beside others."""
    config = settings(models, table, "unused", "t5", "classification")
    ends = check_model_name(config)
    assert ends == tokenizer.eos_token_id
    assert check_model_name(settings(models, table, "unused", "bert", "classification")) is None
    texts = ["a visit", f"a visit {tokenizer.eos_token} and another"]
    rows = Rows(table, {"text": texts, "label": ["often"] * 2}, [1, 2])
    with pytest.raises(DataError, match="line 2: its text spells out the token"):
        encode_rows(rows, tokenizer, config, ends)
    assert len(encode_rows(rows, tokenizer, config)) == 2
    other = hf.AutoTokenizer.from_pretrained(QUICKSTART)
    with pytest.raises(ConfigError, match="its tokenizer does not add"):
        encode_rows(rows, other, config, other.eos_token_id)


def test_labels_of_a_row_are_read_from_lists_and_from_text(models, table, tokenizer):
    config = settings(models, table, "unused", "bert", "multi-label")
    given = ["twice", "twice,daily", "", "['daily']", ["daily", "twice"], []]
    rows = Rows(table, {"text": ["a"] * len(given), "kinds": given}, range(len(given)))
    found = [item["labels"] for item in encode_rows(rows, tokenizer, config).items]
    assert found == [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]


@cases(
    ("model", "task", "others", "words"),
    [
        ("gpt2", "seq2seq", {}, "is no model for seq2seq; it fits causal-lm"),
        ("t5", "causal-lm", {}, "is no model for causal-lm; it fits seq2seq"),
        ("t5", "classification", {"peft": "prompt"}, "takes no soft prompts"),
        ("bert", "token-classification", {"peft": "prompt"}, "soft prompts"),
        ("bert", "regression", {"labels": ["a", "b"]}, "labels belongs to classification"),
        ("t5", "seq2seq", {"prompt_column": None, "target_column": None}, "seq2seq needs prompt_column"),
        ("t5", "seq2seq", {"method": "sap", "epsilon": None, "method_options": {"eta": 1}}, "unperturbed"),
        ("bert", "token-classification", {"method": "ewft"}, "unperturbed"),
    ],
)
def test_models_and_settings_that_do_not_fit(models, tmp_path, model, task, others, words):
    """Refused although neither the data nor the output folder exist."""
    config = settings(models, tmp_path / "absent.jsonl", tmp_path / "run", model, task, **others)
    with pytest.raises(ConfigError, match=words):
        finetune(config)
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_size_is_named_with_a_way_on(models, table, tokenizer, tmp_path):
    config = hf.AutoConfig.from_pretrained(models / "bert", num_labels=3)
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path / "graded")
    tokenizer.save_pretrained(tmp_path / "graded")
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"classifier.* is \[3.* not \[1.*base_model"):
        finetune(settings(tmp_path, table, run, "graded", "regression"))
    assert not run.exists() or not any(run.iterdir())
    # The way on that it names.
    hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "graded").base_model.save_pretrained(
        tmp_path / "graded"
    )
    finetune(settings(tmp_path, table, run, "graded", "regression"))
    assert (run / "card.json").exists()


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
