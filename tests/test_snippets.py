"""The code blocks of README and docs run as they stand, on a model as `from_pretrained` returns it: in eval mode.

Every Python block is executed. `NOT_RUN` is all that is left out, and why; the blocks of CONTRIBUTING.md run in
`tests/test_documents.py`, and the commands of shell blocks in `tests/test_commands.py`.
"""

import inspect
import math
import re
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import fastdp
from fastdp.accounting import calibrate, dpsgd, membership_bound
from fastdp.cli import app
from fastdp.methods.selective import RuleDetector, Span, measure_detector
from fastdp.quickstart import MODEL
from fastdp.quickstart.corpus import private_records
from tests.cases import cases

ROOT = Path(__file__).parent.parent
WIDTH, LENGTH, VOCABULARY = 24, 6, 1000
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
#: Its Python blocks are one program, in an empty folder.
TUTORIAL = "docs/tutorial.md"
#: Python blocks that are not executed, by a phrase in them.
NOT_RUN = {
    "from opacus": "another library's side of a comparison",
    "from fastDP": "the same",
    "service.wait()": "serves until it is stopped, for another machine; tests/split runs both sides",
    "class Biases": "executed by tests/test_documents.py, which checks what it computes",
    "HALVES = Op(": "the same",
}
#: Libraries that Python blocks need and an environment of the tests may lack, by a phrase in them.
NEEDS = {"BitsAndBytesConfig": "bitsandbytes"}


def rows(count, ids=False):
    drawn = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row, **({"example_ids": i} if ids else {})} for i, row in enumerate(drawn)]


def collate(items):
    return {key: torch.tensor([item[key] for item in items]) for key in items[0]}


def world(page):
    """What a page's reader has at hand."""
    torch.manual_seed(0)
    layers = 1 if page in ("docs/loops.md", "docs/audit.md") else 5
    size = {"n_embd": WIDTH, "n_layer": layers, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=2)).eval()
    local = "ewft" in page
    train = rows(64, ids=local)
    if local:
        # Its sequences have one length, which is public.
        train = [{**row, "input_ids": [1 + i % 7] * 64, "labels": [1 + i % 7] * 64} for i, row in enumerate(train)]
    loader = DataLoader(train, batch_size=32, collate_fn=collate)
    public = [collate([{key: value for key, value in row.items() if key != "example_ids"} for row in train[:8]])]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {
        **{"torch": torch, "model": model, "optimizer": optimizer, "train": train, "collate": collate},
        **{"loader": loader, "data_loader": loader, "public_batches": public, "public_labelled_batches": public},
    }


def texts_world():
    """What a reader has at hand whose data are texts: the model that ships with the package, and its tokenizer."""
    folder = resources.files("fastdp.quickstart") / "model"
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    texts = ["Patient: Anna McCray, aged 52.", "Seen 5 September: back pain for 10 days."]
    ids = tokenizer(texts, return_tensors="pt", padding=True)
    spans = [[Span("PERSON", 9, 20)], []]
    return {
        **{"model": GPT2LMHeadModel.from_pretrained(str(folder)), "tokenizer": tokenizer, "texts": texts, "batch": ids},
        **{"labels": [0, 1], "public_ids": ids["input_ids"].tolist(), "public_labels": [0, 1]},
        "quality": measure_detector(RuleDetector(), texts, spans),
    }


def classifier_world():
    """What a reader has at hand who splits a classifier."""
    size = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(**size, vocab_size=64))
    ids = torch.arange(12).reshape(2, 6)
    return {"model": model, "ids": ids, "mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}


def blocks(page):
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in found if not any(phrase in block for phrase in NOT_RUN)]


@pytest.mark.parametrize(
    ("page", "number"), [(page, i) for page in PAGES if page != TUTORIAL for i in range(len(blocks(page)))]
)
def test_a_code_block_runs_as_it_stands(page, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "docs/audit.md":
        # A tenth of the canaries of the page, so that the test is short; each block goes on from the first.
        monkeypatch.setattr("fastdp.audit.GradientCanaries.__init__", fewer(fastdp.audit.GradientCanaries.__init__))
    # With .95 an audit refutes what is true in one run of twenty at most.
    block = blocks(page)[number].replace("confidence=0.95", "confidence=1 - 1e-6")
    for phrase, library in NEEDS.items():
        if phrase in block:
            pytest.importorskip(library)
    names = {**world(page), "fastdp": fastdp, "DataLoader": DataLoader}
    if page in ("docs/sap.md", "docs/federated.md"):
        names |= classifier_world() if "split_model" in block else texts_world()
    exec("from fastdp import audit\nfrom fastdp.methods import ewft", names)
    exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    if "data_loader" in block and "for batch in" in block and "ewft" not in page:
        assert names["private"].steps_done > 0


def test_every_block_that_is_left_out_is_there():
    texts = "".join((ROOT / page).read_text() for page in PAGES)
    assert all(phrase in texts for phrase in (*NOT_RUN, *NEEDS))


def test_recipes_give_each_row_its_own_loss():
    names = {}
    exec(next(block for block in blocks("docs/loops.md") if "def several_labels" in block), names)
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([[1, 1, 0, -100], [0, 1, 1, 1], [1, 0, -100, -100]])
    cases = {
        "weighted_classes": (torch.randn(3, 2, generator=generator), {"labels": torch.tensor([0, 1, 1])}),
        "token_means": (torch.randn(3, 4, 2, generator=generator), {"labels": labels}),
        "regression": (torch.randn(3, 2, generator=generator), {"targets": torch.randn(3, 2, generator=generator)}),
        "several_labels": (
            torch.randn(3, 2, generator=generator),
            {"targets": torch.tensor([[0, 1], [1, 1], [0, 0.0]])},
        ),
        "better_than": (torch.randn(3, 2, generator=generator), {}),
    }
    assert cases.keys() == {name for name, value in names.items() if inspect.isfunction(value)}
    for name, (output, batch) in cases.items():
        together = names[name](output, batch)
        alone = [names[name](output[i : i + 1], {k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)]
        assert together.shape == (3,)
        assert torch.allclose(together, torch.cat(alone))


def fewer(begin):
    return lambda self, private, count, **options: begin(self, private, count // 10, **options)


@pytest.mark.timeout(600)
def test_the_tutorial_runs_from_the_table_to_generated_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks(TUTORIAL)), {})
    said = capsys.readouterr().out
    assert re.search(r"epsilon [78]\.\d\d", said), said
    # A model that the noise has broken ends at once.
    assert re.search(r"What does item 7 cost\? ?\w", said), said
    verified = CliRunner().invoke(app, ["verify", "items-card.json"])
    assert verified.exit_code == 0, verified.output


def numbers(columns):
    """Rows of the tables of choosing.md with so many columns."""
    found = re.findall(r"^\| [\d.]+ \|.*$", (ROOT / "docs" / "choosing.md").read_text(), flags=re.MULTILINE)
    cells = [[float(cell.strip(" %")) for cell in row.strip("|").split("|")] for row in found]
    return [row for row in cells if len(row) == columns]


def planned(batch, epsilon):
    """Steps, noise multiplier and event of what choosing.md speaks of: 4 epochs over 40,000 examples."""
    steps = math.ceil(40_000 / batch) * 4
    multiplier = calibrate(lambda noise: dpsgd(noise, batch / 40_000, steps), epsilon, 1e-5)
    return steps, multiplier, dpsgd(multiplier, batch / 40_000, steps)


@cases("row", numbers(5))
def test_what_an_epsilon_means(row):
    _, multiplier, event = planned(256, row[0])
    bounds = [100 * membership_bound(event, rate) for rate in (0.001, 0.01, 0.1)]
    assert row[1:] == pytest.approx([multiplier, *bounds], rel=1e-3, abs=6e-3)


@cases("row", numbers(4))
def test_what_a_batch_costs(row):
    steps, multiplier, _ = planned(int(row[0]), 8.0)
    assert row[1:] == pytest.approx([steps, multiplier, 1000 * multiplier / row[0]], rel=1e-3, abs=6e-4)


PORTS = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "from-opacus.md").read_text(), flags=re.DOTALL)


def texts():
    """What a script of trl has at hand."""
    datasets = pytest.importorskip("datasets")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    rows = datasets.Dataset.from_dict({"text": private_records(64, seed=0)})
    return {"model": GPT2LMHeadModel.from_pretrained(MODEL, dtype=torch.float32), "tokenizer": tokenizer, "texts": rows}


def ported(number):
    """The program after a port, which changes at most nine lines."""
    lines = PORTS[number].splitlines()
    assert {line[:1] for line in lines} <= {" ", "+", "-", ""}
    assert 0 < sum(line[:1] in ("+", "-") for line in lines) <= 9
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != left_out) for left_out in "+-")
    assert "fastdp" not in before
    compile(before, "before", "exec")
    return after


def test_a_loop_a_trainer_and_trl_are_ported():
    assert [next(word for word in ("for epoch", "DPTrainer", "DPSFTTrainer") if word in port) for port in PORTS] == [
        "for epoch",
        "DPTrainer",
        "DPSFTTrainer",
    ]
    assert all(map(ported, range(len(PORTS))))


#: What trl's trainers do is in tests/integrations/test_trl.py.
@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_port_changes_at_most_nine_lines_and_trains(number, tmp_path, monkeypatch):
    after = ported(number)
    for library in ("trl", "accelerate"):
        if library in after or "Trainer" in after:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    names = {**world("docs/loops.md"), **(texts() if "trl" in after else {})}
    exec(compile(after, f"port {number + 1}", "exec"), names)
    private = names["private"] if "private" in names else names["trainer"].private
    assert private.steps_done == private.total_steps > 0
    assert (tmp_path / "out").exists()
