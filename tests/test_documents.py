"""What documents say can be done is done here, and what they point at is there."""

import re
import statistics
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import fastdp
from fastdp.ops.table import OPS
from tests.cases import cases
from tests.engine.runs import clipped_sum, error, join, logical_step, one_by_one, start

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
#: Words that a page may have.
WORDS = {
    "README.md": 900,
    "SECURITY.md": 900,
    "docs/pitfalls.md": 600,
    "docs/decisions.md": 2500,
    "docs/attacks.md": 1200,
    "docs/results.md": 3500,
    "docs/kernels.md": 2500,
    "docs/federated.md": 1200,
    "docs/security-parties.md": 900,
    "docs/clipping.md": 2100,
    "docs/rapft.md": 1200,
    "docs/sap.md": 1200,
    "docs/split.md": 1200,
    "docs/ewft.md": 1200,
    "docs/frost.md": 1200,
    "docs/zeroth.md": 900,
}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_method_of_one_file_runs_and_its_card_verifies():
    names = {"__name__": __name__}
    exec(next(block for block in blocks("CONTRIBUTING.md") if "class Biases" in block), names)
    exact = start(method=names["Biases"](0.5))
    got, batches = logical_step(exact)
    gradients = one_by_one(exact.model, join(batches))
    for end in ("bias", "weight"):
        expected = clipped_sum([{n: g for n, g in one.items() if n.endswith(end)} for one in gradients], 0.5)
        assert error({n: got[n] for n in expected}, {n: t / 8 for n, t in expected.items()}) < 1e-5
    private = start(method=names["Biases"](0.5), noise_multiplier=1.0, target_delta=1e-5, unsafe_seed=None)
    logical_step(private)
    assert private.policy.noise_multiplier == pytest.approx(1.0)
    assert fastdp.accounting.verify(private.card())


def test_the_op_of_one_file_runs_under_every_front():
    names = {"__name__": __name__}
    # Other tests walk the table of ops, which this one is not of.
    with patch.dict(OPS):
        exec(next(block for block in blocks("CONTRIBUTING.md") if "HALVES" in block), names)
    x = torch.arange(7, dtype=torch.float32)
    for halves in (names["halves"], torch.ops.fastdp.halves.default, torch.compile(names["halves"], backend="eager")):
        assert torch.equal(halves(x), x / 2)
    with pytest.raises(TypeError, match="floats"):
        names["halves"](torch.arange(3))


@cases("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:\s]+)\)", text)
    paths = re.findall(r"`((?:fastdp|kernels|csrc|tests|bench|docs|examples)/[\w./-]*\w)`", text)
    missing = [target for target in links if not (page.parent / target).exists()]
    missing += [path for path in paths if "NAME" not in path and "FAMILY" not in path and not (ROOT / path).exists()]
    assert not missing


def test_every_result_is_named_where_it_is_read():
    """By its path, by a pattern, or, where a page speaks of all that a folder holds, by the folder."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = re.findall(r"bench/results/[\w./*-]*[\w/]", text)
    files = [path.relative_to(ROOT) for path in (ROOT / "bench" / "results").rglob("*.json")]
    assert len(files) > 50
    unread = [file for file in files if not any(file.match(name + "*" * name.endswith("/")) for name in named)]
    assert unread == []


def test_every_page_stands_in_the_sites_list():
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed


def sentences(text):
    """Those of paragraphs and list items: headings, tables, code and pictures have none."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ {4}.*$|^(#|\|| *!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    paragraphs = re.sub(r"\]\([^)]*\)", "]", text).split("\n\n")
    found = [part for paragraph in paragraphs for part in re.split(r"(?<=[.!?])[*`)]*\s+", paragraph)]
    return [part for part in found if re.search(r"\w", part)]


@cases("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_page_is_short_and_so_are_its_sentences(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS.get(page, 3000)
    lengths = {sentence: len(re.findall(r"\w[\w.,'/-]*", sentence)) for sentence in sentences(text)}
    most = 30 if page == "SECURITY.md" else 40
    assert [sentence for sentence, length in lengths.items() if length > most] == []
    assert statistics.median(lengths.values()) <= 18


@cases("page", PAGES)
def test_no_line_of_code_is_wider_than_the_site(page):
    code = "".join(re.findall(r"^```.*?^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE))
    assert [line for line in code.splitlines() if len(line) > 88] == []


def test_there_are_twenty_short_decisions():
    records = re.split(r"^## \d+\. ", (ROOT / "docs" / "decisions.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(records) == 20
    for record in records:
        assert len(record.split()) <= 120
        assert re.findall(r"^\*(\w+)\.\*", record, flags=re.MULTILINE) == ["Context", "Decision", "Consequence"]


def test_all_pages_together_are_a_short_book():
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 40_000
