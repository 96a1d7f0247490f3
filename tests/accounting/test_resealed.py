"""A run's card whose fields were changed one at a time, by somebody who renews its digest, against its weights and ledger."""

import copy
import json
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from fastdp.accounting import verify
from fastdp.accounting.card import digest
from fastdp.finetune import finetune
from fastdp.private.shapes import shape_statement
from tests.cases import cases
from tests.finetune.conftest import config, files, model_folder  # noqa: F401 - fixtures

#: Words for a reader, which nothing else on a card, in weights or in a ledger says a second time.
FREE = (
    "notes",
    "software",
    "assumptions.2",
    "remaining.1",
    "model.name",
    "model.processes",
    "created",
    "epsilon.target",
)


@pytest.fixture(scope="module")
def run(model_folder, files, tmp_path_factory):  # noqa: F811
    made = config.__wrapped__(model_folder, files, tmp_path_factory.mktemp("resealed"))
    finetune(replace(made, eval=None, samples=0))
    folder = tmp_path_factory.getbasetemp() / made.output
    return folder, json.loads((folder / "card.json").read_text())


def leaves(value, path=()):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if path:
        yield path
    for key, inner in children:
        yield from leaves(inner, (*path, key))


def at(card, path):
    for key in path:
        card = card[key]
    return card


def others(value):
    """Values that might stand in the place of one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value / 2, value * 2, value * 1.013, value + 1, "inf"]
    if isinstance(value, str):
        return ["other", ""]
    return {list: [["x"]], dict: [{}]}.get(type(value), [1, "x"])


def changed(card):
    for path in leaves(card):
        for number, new in enumerate([None, *others(at(card, path))]):
            body = copy.deepcopy(card)
            if number:
                at(body, path[:-1])[path[-1]] = new
            else:
                del at(body, path[:-1])[path[-1]]
            if body != card and path != ("digest",):
                yield ".".join(map(str, path)), new, {**body, "digest": digest(body)}


def test_no_field_but_words_can_be_changed(run):
    folder, card = run
    assert verify(card, weights=folder, ledger=folder / "ledger.jsonl").guarantee
    tried = list(changed(card))
    assert len(tried) > 250
    held = [
        (path, new)
        for path, new, body in tried
        if verify(body, weights=folder, ledger=folder / "ledger.jsonl").guarantee
    ]
    # A card may be written without cross-checks.
    assert {path for path, _ in held if not path.startswith(FREE)} == {"files", "epsilon.cross_checks"}
    assert ("epsilon.cross_checks", {}) in held
    # A card of a loop of one's own has none: that nobody looked is said.
    without = next(body for path, new, body in tried if path == "files" and "files" not in body)
    assert any("adapter's config" in said for said in verify(without, weights=folder).unchecked)
    assert ("epsilon.target", card["epsilon"]["target"] / 2) not in held


def test_the_sentence_on_shapes_is_a_known_one_and_the_only_one(run):
    _, card = run
    public, private = map(shape_statement, (True, False))
    others = card["remaining"][:2]
    for sentences, holds in (([public], True), ([private], True), ([], False), ([public, private], False)):
        body = {**card, "remaining": [*others, *sentences]}
        result = verify({**body, "digest": digest(body)})
        assert result.holds is holds
        assert holds or "what one unit's shape does" in result.reason


def test_a_swapped_sentence_on_shapes_fails_against_the_ledger(run):
    folder, card = run
    body = {**card, "remaining": [*card["remaining"][:2], shape_statement(True)]}
    swapped, ledger = {**body, "digest": digest(body)}, folder / "ledger.jsonl"
    assert "shapes" in next(said for said in verify(swapped).unchecked if "the run's ledger" in said)
    assert "sentence on shapes is not that of a ledger whose shapes are 'own'" in verify(swapped, ledger=ledger).reason
    assert verify(card, ledger=ledger).guarantee


@cases(
    ("field", "value"),
    [
        *(("epsilon", {"upper_bound": 9.0}), ("epsilon", {"delta": 2e-3}), ("epsilon", {"accountant": "rdp"})),
        *(("epsilon", {"cross_checks": {"rdp": 0.1, "prv_upper_bound": 0.1}}), ("membership", {"0.01": 1.013})),
        *(("noise_source", {"secure_rounding": False}), ("noise_source", {"key": "somewhere"})),
        *(("steps", {"planned": 1}), ("noise_multiplier", 2.0), ("sample_rate", 0.9), ("sampling", "other")),
        *(("version", 1), ("version", 2.0), ("created", "once")),
    ],
)
def test_what_the_card_alone_shows_needs_no_ledger(run, field, value):
    _, card = run
    new = {**card[field], **value} if isinstance(value, dict) else value
    body = {**card, field: new}
    assert not verify({**body, "digest": digest(body)}).holds


def double_alpha(adapter):
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 2 * settings["lora_alpha"]}))


def add_file(adapter):
    save_file(load_file(adapter / "adapter_model.safetensors"), adapter / "more.safetensors")


def remove_config(adapter):
    (adapter / "adapter_config.json").unlink()


def rename_tensors(adapter):
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(dict(zip(tensors, reversed(tensors.values()))), adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (double_alpha, "adapter_config.json was changed"),
        (add_file, "more.safetensors is no file of it"),
        (remove_config, "adapter_config.json is not there"),
        (rename_tensors, "adapter_model.safetensors was changed"),
    ],
)
def test_the_files_beside_the_weights_are_bound(run, tmp_path, change, words):
    folder, card = run
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for path in (folder / "adapter").iterdir():
        (adapter / path.name).write_bytes(path.read_bytes())
    for weights in (tmp_path, adapter):
        assert verify(card, weights=weights).guarantee
        assert verify(adapter / "README.md", weights=weights).guarantee
    change(adapter)
    for weights in (tmp_path, adapter):
        assert words in verify(card, weights=weights).reason
