"""`fastdp privatize`: what it writes, what it leaves out, and what it refuses."""

import csv
import json

import pytest
import torch
from transformers import BertConfig, BertModel

import fastdp
from fastdp import accounting
from tests.elsewhere import elsewhere
from tests.test_cli import refused, run, told
from tests.tokenizers_for_tests import word_tokenizer

WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(60))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    word_tokenizer(WORDS, pad_token="[PAD]").save_pretrained(path)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    BertModel(config).save_pretrained(path)
    return path


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [[f"w{i % 60} w{(7 * i) % 60}", i % 2, f"user{i}"] for i in range(50)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["text", "label", "name"], *rows])
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_only_the_text_and_the_columns_asked_for_are_written(folder, reviews, tmp_path, kind):
    out = tmp_path / f"private.{kind}"
    said = told("privatize", reviews, out, "--eta", 1e6, "--model", folder, "--keep", "label")
    content = out.read_text()
    assert "user" not in content
    lines = content.splitlines()
    if kind == "jsonl":
        assert json.loads(lines[8]) == {"text": "w8 w56", "label": "0"}
    else:
        assert lines[0].replace("\t", ",") == "text,label"
        assert lines[9].replace("\t", ",") == "w8 w56,0"
    statement = json.loads((tmp_path / "private.privacy.json").read_text())
    assert statement["eta"] == 1e6
    assert statement["displacement"]["unchanged"] == 1.0
    assert statement["tokens_released"] == 100
    assert statement["columns_copied_unprotected"] == ["label"]
    assert "100.0% of the vocabulary" in said


def test_small_eta_and_ids(folder, reviews, tmp_path):
    out = tmp_path / "ids.jsonl"
    told("privatize", reviews, out, "--eta", 1, "--model", folder, "--ids", "--mechanism", "exponential")
    ids = [json.loads(line)["input_ids"] for line in out.read_text().splitlines()]
    assert all(len(row) == 2 for row in ids)
    assert sum(row[0] == 2 + i % 60 for i, row in enumerate(ids)) < 25


CLASSES = ("--label", "0", "--label", "1")


@pytest.fixture
def public(tmp_path):
    """Class 0 speaks of w0, w2 and w4, class 1 of w1, w3 and w5."""
    path = tmp_path / "public.csv"
    rows = [["w0 w2 w4", 0], ["w1 w3 w5", 1]] * 30
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *rows])
    return path


def test_public_counts_favour_tokens_of_the_class_that_leaves_anyway(folder, reviews, public, tmp_path):
    """What labels do to draws: tests/methods/sap/test_privatizer.py."""
    out = tmp_path / "out.csv"
    plan = (
        "privatize",
        reviews,
        out,
        "--eta",
        0.01,
        "--model",
        folder,
        *CLASSES,
        "--cti",
        "prior",
        "--cti-public",
        public,
    )
    said = told(*plan, "--keep", "label")
    assert "6 tokens occur often enough to be favoured; public counts" in said
    statement = json.loads((tmp_path / "out.privacy.json").read_text())
    assert statement["guarantee"].startswith("metric")
    assert statement["mechanism"]["cti"]["counts"] == "public"
    assert statement["mechanism"]["cti"]["public_text"]["records"] == 60
    assert statement["also"] == []
    # A label that stays must not show: both classes then favour the words of both.
    labels = []
    stream = fastdp.TextPrivatizer.stream_texts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fastdp.TextPrivatizer,
            "stream_texts",
            lambda self, t, known, **o: labels.append(known) or stream(self, t, **o),
        )
        assert told(*plan, "--overwrite")
    assert labels == [None]


def test_the_quotient_tells_a_cell_at_an_epsilon(folder, reviews, public, tmp_path):
    out = tmp_path / "private.csv"
    names = ["--cti", "quotient", "--cells", 4, "--epsilon", 2, "--cti-public", public, "--label", 0, "--label", 1]
    said = told("privatize", reviews, out, *names, "--model", folder)
    words = {word for line in out.read_text().splitlines()[1:] for word in line.split()}
    assert len(words) <= 4
    card = json.loads((tmp_path / "private.privacy.json").read_text())
    assert card["kind"] == "pure"
    assert card["budget"]["of_a_unit"] == 2
    assert accounting.verify(card).guarantee
    assert "quotient of 4 cells, epsilon 2:" in said


def test_noised_counts_are_accounted_for_and_the_papers_form_guarantees_nothing(folder, reviews, tmp_path):
    out = tmp_path / "out.csv"
    plan = ("privatize", reviews, out, "--eta", 1, "--model", folder, *CLASSES)
    said = told(*plan, "--cti", "prior", "--cti-noise", 2, "--cti-delta", 1e-6)
    epsilon = accounting.epsilon(accounting.gaussian(2.0), 1e-6)
    assert f"counts at epsilon {epsilon:.4g} and delta 1e-06" in said
    statement = json.loads((tmp_path / "out.privacy.json").read_text())
    assert statement["also"][0]["epsilon"]["upper_bound"] == pytest.approx(epsilon)
    assert accounting.deserialise(statement["also"][0]["event"]) == accounting.gaussian(2.0)
    assert statement["guarantee"].startswith("metric")
    said = told(*plan, "--cti", "paper", "--overwrite")
    assert "no guarantee" in said
    statement = json.loads((tmp_path / "out.privacy.json").read_text())
    assert statement["guarantee"] == "none"
    assert any("without noise" in reason for reason in statement["why_no_guarantee"])


def test_contributing_tokens_that_cannot_be_sound_are_refused(folder, reviews, public, tmp_path):
    out = tmp_path / "out.csv"
    plan = ("privatize", reviews, out, "--eta", 1, "--model", folder)
    for options, words in (
        ((*CLASSES, "--cti", "prior"), "--cti-public"),
        ((*CLASSES, "--cti", "prior", "--cti-public", reviews), "the private data itself"),
        ((*CLASSES, "--cti", "prior", "--cti-public", public, "--cti-noise", 1), "either"),
        ((*CLASSES, "--cti", "prior", "--cti-noise", 0), "above 0"),
        ((*CLASSES, "--cti", "prior", "--cti-noise", 1, "--mechanism", "laplace"), "choose 'exponential'"),
        ((*CLASSES, "--cti", "prior", "--cti-noise", 1, "--cti-delta", 2), "delta"),
        (("--cti", "prior", "--cti-noise", 1), "--label"),
        (("--label", "0", "--label", "0", "--cti", "prior", "--cti-noise", 1), "once"),
        (("--label", "0", "--label", "2", "--cti", "prior", "--cti-noise", 1), "line 3: the label '1'"),
        (("--cti-noise", 1), "name its form"),
        (CLASSES, "give its form"),
    ):
        assert words in refused(*plan, *options)
    assert not out.exists()


@pytest.mark.parametrize("mechanism", ["laplace", "exponential"])
def test_draws_are_made_on_the_device_that_is_named(folder, reviews, tmp_path, mechanism):
    with elsewhere() as ran:
        options = ("--eta", 1e6, "--model", folder, "--mechanism", mechanism)
        told("privatize", reviews, tmp_path / "out.txt", *options, "--device", "meta")
    assert ran["private_snap" if mechanism == "laplace" else "exponential_choice"] >= 2
    assert (tmp_path / "out.txt").read_text().splitlines()[8] == "w8 w56"
    assert "device abacus cannot be used" in refused(
        "privatize", reviews, tmp_path / "other.txt", *options, "--device", "abacus"
    )


def test_refusals(folder, reviews, tmp_path):
    out = tmp_path / "out.csv"
    plan = (reviews, out, "--model", folder)
    for eta in (0, -1, "nan"):
        assert "above 0" in refused("privatize", *plan, "--eta", eta)
    assert "no column" in refused("privatize", *plan, "--eta", 1, "--text-column", "review")
    assert "leave it out" in refused("privatize", *plan, "--eta", 1, "--keep", "text")
    assert "OUT is IN" in refused("privatize", reviews, reviews, "--eta", 1, "--model", folder)
    assert "no known kind" in refused("privatize", reviews, tmp_path / "out.pdf", "--eta", 1, "--model", folder)
    assert "--ids needs" in refused("privatize", *plan, "--eta", 1, "--ids")
    assert "texts alone" in refused(
        "privatize", reviews, tmp_path / "out.txt", "--eta", 1, "--model", folder, "--keep", "label"
    )
    quotient = ("--cti", "quotient", "--cti-public", reviews, *CLASSES)
    assert "--eta is missing" in refused("privatize", *plan)
    assert "belongs to --cti quotient" in refused("privatize", *plan, "--epsilon", 1)
    assert "give --epsilon" in refused("privatize", *plan, *quotient, "--eta", 1)
    assert "--exact is a cost" in refused("privatize", *plan, *quotient, "--epsilon", 1, "--exact")
    assert "--cells belongs" in refused("privatize", *plan, "--eta", 1, "--cells", 3)
    assert not out.exists()
    out.write_text("kept")
    assert "--overwrite" in refused("privatize", *plan, "--eta", 1)
    assert out.read_text() == "kept"
    unknown = tmp_path / "unknown.txt"
    unknown.write_text("w1\nzzz\n")
    target = tmp_path / "unknown.private.txt"
    assert "unknown token" in refused(
        "privatize", unknown, target, "--eta", 1, "--model", folder, "--unknown", "refuse"
    )
    assert not target.exists()
    assert not list(tmp_path.glob(".unknown*"))


def test_the_same_texts_into_another_file_are_refused_or_said(folder, reviews, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")
    first = ("privatize", reviews, tmp_path / "one.csv", "--eta", 9, "--model", folder)
    assert told(*first)
    second = ("privatize", reviews, tmp_path / "two.csv", "--eta", 9, "--model", folder)
    assert "released before, by laplace, eta 9 to" in refused(*second)
    assert not (tmp_path / "two.csv").exists()
    assert "released before" in refused(*first, "--overwrite")
    assert told(*second, "--again")
    earlier = json.loads((tmp_path / "two.privacy.json").read_text())["earlier_releases"]
    assert len(earlier) == 1
    assert "one.csv" in earlier[0]
    assert "earlier_releases" not in json.loads((tmp_path / "one.privacy.json").read_text())
    assert told("verify", tmp_path / "two.privacy.json")


def test_what_was_drawn_in_vain_is_no_release(folder, reviews, tmp_path, monkeypatch):
    """Stopped on the way, it leaves no file, and the same command runs again; once the file is there, it is refused."""
    monkeypatch.setenv("FASTDP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FASTDP_AGAIN")
    command = ("privatize", reviews, tmp_path / "out.csv", "--eta", 20, "--model", folder, "--mechanism", "exponential")

    def stopped(*_, **__):
        yield "w1"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fastdp.TextPrivatizer, "stream_texts", stopped)
        assert run(*command).exit_code == 130
    assert not (tmp_path / "out.csv").exists()
    assert told(*command)
    assert "released before" in refused(*command, "--overwrite")
