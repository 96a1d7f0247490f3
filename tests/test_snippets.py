"""The code blocks of README and docs run as they stand, on a model as `from_pretrained` returns it: in eval mode.

Every Python block is executed. `NOT_RUN` is all that is left out, and why; the blocks of CONTRIBUTING.md run in
`tests/test_documents.py`, and the commands of shell blocks in `tests/test_commands.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import fastdp
from fastdp.methods.selective import RuleDetector, Span, measure_detector

ROOT = Path(__file__).parent.parent
WIDTH, LENGTH, VOCABULARY = 24, 6, 1000
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
#: Pages whose Python blocks are one program, and where it runs.
ONE_PROGRAM = {"docs/tutorial.md": "tests/test_tutorial.py"}
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


def rows(count: int, ids: bool = False) -> list[dict[str, Any]]:
    drawn = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row, **({"example_ids": i} if ids else {})} for i, row in enumerate(drawn)]


def collate(items: Sequence[Any]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([item[key] for item in items]) for key in items[0]}


def world(page: str) -> dict[str, Any]:
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
    loader = DataLoader(train, batch_size=32, collate_fn=collate)  # type: ignore[arg-type]
    public = [collate([{key: value for key, value in row.items() if key != "example_ids"} for row in train[:8]])]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {
        **{"torch": torch, "model": model, "optimizer": optimizer, "train": train, "collate": collate},
        **{"loader": loader, "data_loader": loader, "public_batches": public, "public_labelled_batches": public},
    }


def texts_world() -> dict[str, Any]:
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


def classifier_world() -> dict[str, Any]:
    """What a reader has at hand who splits a classifier."""
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    model = BertForSequenceClassification(BertConfig(**size, vocab_size=64))
    ids = torch.arange(12).reshape(2, 6)
    return {"model": model, "ids": ids, "mask": torch.ones_like(ids), "labels": torch.tensor([0, 1])}


def blocks(page: str) -> list[str]:
    if page in ONE_PROGRAM:
        return []
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in found if not any(phrase in block for phrase in NOT_RUN)]


@pytest.mark.parametrize(("page", "number"), [(page, i) for page in PAGES for i in range(len(blocks(page)))])
def test_a_code_block_runs_as_it_stands(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "docs/audit.md":
        # A tenth of the canaries of the page, so that the test is short; each block goes on from the first.
        monkeypatch.setattr("fastdp.audit.GradientCanaries.__init__", fewer(fastdp.audit.GradientCanaries.__init__))
    # With .95 an audit refutes what is true in one run of twenty at most.
    block = blocks(page)[number].replace("confidence=0.95", "confidence=1 - 1e-6")
    for phrase, library in NEEDS.items():
        if phrase in block:
            pytest.importorskip(library)
    names: dict[str, Any] = {**world(page), "fastdp": fastdp, "DataLoader": DataLoader}
    if page in ("docs/sap.md", "docs/federated.md"):
        names |= classifier_world() if "split_model" in block else texts_world()
    exec("from fastdp import audit\nfrom fastdp.methods import ewft", names)
    exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    if "data_loader" in block and "for batch in" in block and "ewft" not in page:
        assert names["private"].steps_done > 0


def test_every_block_that_is_left_out_is_there() -> None:
    texts = "".join((ROOT / page).read_text() for page in PAGES)
    assert all(phrase in texts for phrase in (*NOT_RUN, *NEEDS))
    assert all(Path(page).name in (ROOT / test).read_text() for page, test in ONE_PROGRAM.items())


def test_recipes_give_each_row_its_own_loss() -> None:
    names: dict[str, Any] = {}
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


def fewer(begin: Any) -> Any:
    return lambda self, private, count, **options: begin(self, private, count // 10, **options)
