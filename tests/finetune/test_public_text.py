"""Text that a run takes as public, and which may not be the private one."""

import json
from dataclasses import replace

import pytest

from fastdp.finetune import ConfigError, finetune
from tests.finetune.runs import classify, public_inputs


@pytest.mark.parametrize("kind", public_inputs(""))
def test_private_data_does_not_pass_for_public(config, files, tmp_path, kind):
    """By whatever method: some of it, in another order and spacing. `tests/test_public.py` has copies of other kinds."""
    head, *rows = (files / "labels.tsv").read_text().splitlines()
    dressed = tmp_path / "dressed.tsv"
    dressed.write_text("\n".join([head, *(row.replace(". ", " .  ") for row in rows[::-1][:9])]) + "\n")
    method, options = public_inputs(str(dressed))[kind]
    settings = classify(config, files, method=method, method_options=options, epsilon=None if method == "sap" else 8.0)
    with pytest.raises(ValueError, match=r"9 of 9 records are private ones \(the first: line 2\)"):
        finetune(settings)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_shared_records_that_are_confirmed_stand_on_the_card(config, files, tmp_path):
    rows = (files / "public.tsv").read_text() + (files / "labels.tsv").read_text().splitlines(keepends=True)[1]
    (tmp_path / "some.tsv").write_text(rows)
    method, options = public_inputs(str(tmp_path / "some.tsv"))["autoencoder"]
    settings = classify(config, files, method=method, method_options=options, epochs=1)
    with pytest.raises(ConfigError, match="1 of 49 records"):
        finetune(settings)
    finetune(replace(settings, public_overlap=1))
    card = json.loads((tmp_path / "run" / "card.json").read_text())
    assert card["mechanism"]["public_text"][0]["shared"] == 1
