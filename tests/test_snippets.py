"""The code blocks of README and docs run as they stand, on a model as `from_pretrained` returns it: in eval mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import fastdp

ROOT = Path(__file__).parent.parent
WIDTH, LENGTH, VOCABULARY = 24, 6, 1000
PAGES = ("README.md", "docs/from-opacus.md", "docs/frost.md", "docs/rapft.md", "docs/audit.md", "docs/ewft.md")


def rows(count: int, ids: bool = False) -> list[dict[str, Any]]:
    drawn = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row, **({"example_ids": i} if ids else {})} for i, row in enumerate(drawn)]


def collate(items: Sequence[Any]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([item[key] for item in items]) for key in items[0]}


def world(page: str) -> dict[str, Any]:
    """What a page's reader has at hand."""
    torch.manual_seed(0)
    size = {"n_embd": WIDTH, "n_layer": 5, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=1, eos_token_id=2)).eval()
    local = "ewft" in page
    train = rows(64, ids=local)
    if local:
        # Its sequences have one length, which is public.
        train = [{**row, "input_ids": [1] * 64, "labels": [1] * 64} for row in train]
    loader = DataLoader(train, batch_size=32, collate_fn=collate)  # type: ignore[arg-type]
    public = [collate([{key: value for key, value in row.items() if key != "example_ids"} for row in train[:4]])]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return {
        **{"torch": torch, "model": model, "optimizer": optimizer, "train": train, "collate": collate},
        **{"loader": loader, "data_loader": loader, "public_batches": public, "public_labelled_batches": public},
    }


def blocks(page: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    return [block for block in found if "from opacus" not in block]


@pytest.mark.parametrize(("page", "number"), [(page, i) for page in PAGES for i in range(len(blocks(page)))])
def test_a_code_block_runs_as_it_stands(
    page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page == "docs/audit.md":
        # A tenth of the canaries of the page, so that the test is short; each block goes on from the first.
        monkeypatch.setattr("fastdp.audit.GradientCanaries.__init__", fewer(fastdp.audit.GradientCanaries.__init__))
    names: dict[str, Any] = {**world(page), "fastdp": fastdp, "DataLoader": DataLoader}
    exec("from fastdp import audit\nfrom fastdp.methods import ewft", names)
    exec(compile(blocks(page)[number], f"{page}, block {number + 1}", "exec"), names)
    if "data_loader" in blocks(page)[number] and "for batch in" in blocks(page)[number] and "ewft" not in page:
        assert names["private"].steps_done > 0


def fewer(begin: Any) -> Any:
    return lambda self, private, count, **options: begin(self, private, count // 10, **options)
