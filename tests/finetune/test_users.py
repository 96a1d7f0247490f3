"""Runs that protect people with several rows."""

import json
from dataclasses import replace

import pytest

from fastdp.accounting import dpsgd, epsilon
from fastdp.finetune import ConfigError, finetune, load_config
from fastdp.quickstart.corpus import private_records
from fastdp.tables import DataError, read_rows
from tests.finetune.conftest import EXAMPLES
from tests.finetune.runs import RAPFT


@pytest.fixture
def notes(config, tmp_path):
    """Settings of a run on four notes of each of twelve patients, one of whom wrote twice as many."""
    path = tmp_path / "notes.jsonl"
    patients = [number // 4 for number in range(44)] + [10] * 4
    rows = zip(private_records(48, seed=1), patients)
    path.write_text("".join(json.dumps({"text": text, "patient": patient}) + "\n" for text, patient in rows))
    return replace(
        config, train=str(path), eval=None, user_column="patient", max_examples_per_user=2, batch_size=4, delta=1e-2
    )


def test_the_example_s_card_and_account_are_of_people(model_folder, functions, tmp_path):
    settings = {"model": str(model_folder), "train": str(functions / "functions.csv"), "epsilon": 8, "delta": 1e-2}
    sizes = {"max_length": 48, "epochs": 1, "batch_size": 4, "samples": 0, "output": str(tmp_path / "run")}
    result = finetune(load_config(EXAMPLES / "people.yaml", settings | sizes))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["unit"] == "user (at most 4 examples)"
    people = len(set(read_rows(functions / "functions.csv", "latin-1").column("module", "")))
    assert card["dataset_size"] == people > 8
    event = dpsgd(result.noise_multiplier, 4 / people, result.steps)
    assert result.epsilon == pytest.approx(epsilon(event, 1e-2), rel=1e-6)
    assert result.epsilon <= 8


def test_a_method_with_two_blocks_takes_people(notes, files):
    source = {"kind": "public", "data": str(files / "public.jsonl"), "examples": 6}
    finetune(replace(notes, method="rapft", method_options={**RAPFT, "source": source}))


@pytest.mark.parametrize(
    ("changes", "row", "error", "words"),
    [
        (
            {"user_column": "doctor"},
            None,
            DataError,
            r"no column 'doctor' \(user_column\); its columns are text, patient",
        ),
        ({"batch_size": 12}, None, ConfigError, "batch_size 12 exceeds the 11 training people"),
        ({"delta": 0.1}, None, ConfigError, "delta 0.1 is not below 1 / 11 people"),
        ({}, {"text": "a", "patient": None}, DataError, r"line 49: column 'patient' \(user_column\) holds nothing"),
        ({}, {"text": "a", "patient": ""}, DataError, r"line 49: column 'patient' \(user_column\) names nobody"),
    ],
)
def test_people_who_do_not_fit_are_refused_before_anything_is_spent(notes, tmp_path, changes, row, error, words):
    if row is not None:
        with open(notes.train, "a") as file:
            file.write(json.dumps(row) + "\n")
    with pytest.raises(error, match=words):
        finetune(replace(notes, **changes))
    assert not (tmp_path / "run").exists()
