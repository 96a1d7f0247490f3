"""The page about runs: what it shows of each, what it leaves out, and that it needs nothing besides itself."""

import json
import math
import re
import shutil

import pytest
import yaml
from hypothesis import given, strategies as st

from fastdp.accounting import noise_source
from fastdp.accounting.card import digest
from fastdp.finetune import ConfigError
from fastdp.finetune.charts import SERIES, Line, chart, running_mean, style, ticks
from fastdp.finetune.report import Record, build_report
from tests.accounting.test_card import card_of_run
from tests.test_cli import told

CARD = card_of_run(model={"name": "m", "trained_parameters": 4242})


def made(folder, epsilon=8.0, steps=40, **parts):
    """A run's folder as `fastdp finetune` leaves it; parts replace its files, and None leaves one out."""
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "learning_rate": 1e-3,
            **(
                {"epsilon": epsilon * (step / steps) ** 0.5 if math.isfinite(epsilon) else "inf"}
                if step % 4 == 0
                else {}
            ),
            "unprotected": {"loss": 3 + 2 / step, "seconds": 0.5},
        }
        for step in range(1, steps + 1)
    ]
    contents = {
        "config.yaml": yaml.safe_dump(
            {"model": "/models/m", "task": "causal-lm", "epsilon": epsilon, "delta": 1e-5} | parts
        ),
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "result.json": json.dumps(
            {
                "epsilon": epsilon if math.isfinite(epsilon) else "inf",
                "steps": steps,
                "trained_parameters": 4242,
                "seconds_per_step": 0.512,
                "peak_bytes": 2**28,
                "noise_multiplier": 0.71,
                "before": {"loss": 3.0, "count": 9, "perplexity": 31.25},
                "after": {"loss": 2.0, "count": 9, "perplexity": 17.75},
                "privacy": None,
                "notes": ["3 of 9 examples were cut"],
            }
        ),
        "card.json": json.dumps(CARD),
        "samples.json": json.dumps({"own": ["<script>alert(1)</script> & more"]}),
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    return folder


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.partition("</style>")[2]))


def test_a_page_about_one_run(tmp_path):
    page = build_report([made(tmp_path / "one")])
    # Nothing that a browser would fetch or run.
    assert not re.search(r"<(script|link|img|iframe|object)|\s(src|href|on\w+)=|url\(|https?:", page)
    text = text_of(page)
    for shown in (
        "ε ≤ 1.08",
        "1e-05",
        "31.25 → 17.75",
        "4 242",
        "0.7100",
        "3 of 9 examples were cut",
        "256 MiB",
        "20 s",
    ):
        assert shown in text
    assert "&lt;script&gt;" in page
    assert "prefers-color-scheme:dark" in page
    assert page.count("<polyline") == 3, "epsilon, and the loss twice"
    assert "fastdp verify one" in text
    assert "At equal epsilon" not in text


def test_what_is_not_protected_can_be_left_out(tmp_path):
    answers = {"unprotected": [{"text": "the record", "right": "yes", "answer": "no"}]}
    folder = made(tmp_path / "one")
    (folder / "samples.json").write_text(json.dumps(answers))
    kept, public = text_of(build_report([folder])), text_of(build_report([folder], public=True))
    for private in ("17.75", "the record", "s a step", "Training loss", "3 of 9", "256 MiB"):
        assert private in kept
        assert private not in public
    assert "ε ≤ 1.08" in public
    (folder / "samples.json").write_text(json.dumps({"own": ["of its own"]}))
    assert "of its own" in build_report([folder], public=True)
    (folder / "card.json").write_text(json.dumps({"guarantee": "none"}))
    assert "of its own" in build_report([folder])
    assert "of its own" not in build_report([folder], public=True), "it may be a record"


def test_runs_are_compared_where_all_have_spent_as_much(tmp_path):
    first, second = made(tmp_path / "a" / "run", 8.0), made(tmp_path / "b" / "run", 4.0, lora_r=16)
    plain = made(tmp_path / "c" / "run", math.inf)
    page = build_report([first, second, plain])
    text = text_of(page)
    assert "Every private run has spent 4.00" in text
    # Half the epsilon of the first is a quarter of its steps, as these are made.
    assert re.search(r"a/run 10 3\.\d+ 8\.00 perplexity 17.75", text)
    assert re.search(r"b/run 40 3\.\d+ 4\.00 perplexity 17.75", text)
    assert re.search(r'<tr class="differs"><th>lora_r</th><td>–</td><td>16</td>', page)
    other = made(tmp_path / "d", 4.0, delta=1e-3)
    assert "compare" in text_of(build_report([first, other]))
    assert "Every private run" not in text_of(build_report([first, other]))


def test_runs_that_promise_nothing_or_go_on(tmp_path):
    void = made(tmp_path / "void")
    (void / "card.json").write_text(json.dumps(card_of_run(noise_source=noise_source(reproducible=True))))
    assert "Nothing is promised: the noise came from a reproducible key" in text_of(build_report([void]))
    forged = {**CARD, "epsilon": {**CARD["epsilon"], "upper_bound": 0.1}}
    (void / "card.json").write_text(json.dumps({**forged, "digest": digest(forged)}))
    assert "Nothing is promised: its card does not hold, the card claims epsilon 0.1 but" in text_of(
        build_report([void])
    )
    going = made(tmp_path / "going")
    for name in ("card.json", "result.json", "samples.json"):
        (going / name).unlink()
    text = text_of(build_report([going]))
    assert "8.00 spent" in text
    assert "--resume" in text
    begun = made(tmp_path / "begun", steps=0)
    (begun / "card.json").unlink()
    assert "no figure yet" in text_of(build_report([begun]))
    local = made(tmp_path / "local")
    (local / "result.json").write_text(json.dumps({"epsilon": "inf", "steps": 1, "privacy": "eta 3 times a distance"}))
    assert "eta 3 times a distance" in text_of(build_report([local]))


def test_folders_without_a_run(tmp_path):
    run = made(tmp_path / "run")
    for folders, words in (
        ([tmp_path / "absent"], "there is no folder"),
        ([tmp_path], "holds no run"),
        ([run, run], "named twice"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_report(folders)
    (run / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result\.json is damaged"):
        Record.read(run, "run")


def test_the_command_writes_beside_the_run_and_for_its_owner(tmp_path):
    run = made(tmp_path / "run")
    assert told("report", run)
    assert (run / "report.html").stat().st_mode & 0o077 == 0
    shutil.copytree(run, tmp_path / "other")
    shown = tmp_path / "shown.html"
    assert told("report", run, tmp_path / "other", "--public", "--output", shown)
    assert shown.stat().st_mode & 0o044


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.booleans())
def test_ticks_are_few_and_cover(low, span, whole):
    high = low + span
    found = ticks(low, high, 5, whole=whole)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-9 * max(abs(low), span)
    assert found[-1] >= high - 1e-9 * max(abs(high), span)
    if whole:
        assert all(tick == int(tick) for tick in found)


def test_charts():
    points = [(float(step), 1.0 / (step + 1)) for step in range(10_000)]
    drawn = chart([Line("a<b", points, limit=0.5), Line("none", [])], "step", "y")
    assert len(drawn) < 20_000, "thinned"
    assert "a&lt;b" in drawn
    assert drawn.count("<polyline") == 1
    numbers = [
        float(value) for pair in re.search(r'points="([^"]+)"', drawn).group(1).split() for value in pair.split(",")
    ]
    assert all(0 <= value <= 480 for value in numbers)
    assert "<circle" in chart([Line("one", [(1.0, 2.0)])], "step", "y")
    assert "nothing to draw" in chart([Line("nan", [(1.0, math.nan)])], "step", "y")
    assert len({style(index) for index in range(3 * SERIES)}) == 3 * SERIES
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
