"""What leaves a run for others: the card goes with the weights, to a folder and to a hub, and names no path of this machine."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import yaml

import fastdp
from fastdp.accounting import verify
from fastdp.accounting.card import public_name
from tests.engine.models import build
from tests.engine.runs import PRIVATE, Classifier, logical_step


def collate(items):
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


def started(model, item):
    data = torch.utils.data.DataLoader([item(i) for i in range(12)], batch_size=4, collate_fn=collate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return fastdp.make_private(model, optimizer, data, epochs=1, **PRIVATE)


@pytest.fixture
def private():
    model = build("gpt2").train()
    # As transformers notes the folder that a model was loaded from.
    model.config._name_or_path = "/home/anna/secret-project/notes-v2"
    run = started(model, lambda i: {"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i})
    logical_step(run)
    return run


class Hub:
    """Takes uploads as the hub's client does, into a folder."""

    folder: Path

    def create_repo(self, repo_id, exist_ok):
        (self.folder / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, repo_id, folder_path, **options):
        shutil.copytree(folder_path, self.folder / repo_id, dirs_exist_ok=True)
        return options


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "folder", tmp_path / "hub", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    return tmp_path / "hub"


def test_a_folder_for_others_holds_weights_card_and_a_page_that_verify(private, tmp_path):
    folder = private.save_pretrained(tmp_path / "model")
    assert all((folder / name).exists() for name in ("model.safetensors", "config.json", "card.json", "card.md"))
    # No page names a path of this machine.
    for name in ("card.json", "card.md", "README.md"):
        assert "notes-v2" in (folder / name).read_text()
        assert "anna" not in (folder / name).read_text()
    found = verify(folder / "README.md", weights=folder)
    assert found.guarantee, found.reason
    head = yaml.safe_load((folder / "README.md").read_text().split("---")[1])
    assert head["tags"] == ["fastdp", "differential-privacy"]
    assert head["privacy"]["epsilon"] >= private.epsilon()
    assert head["privacy"]["unit"] == "example"
    assert "base_model" not in head
    with torch.no_grad():
        next(iter(private.model.parameters())).add_(1.0)
    private.model.save_pretrained(folder)
    assert not verify(folder / "README.md", weights=folder)


def test_a_page_may_be_added_to_but_not_contradicted(private, tmp_path):
    page = private.save_pretrained(tmp_path / "model") / "README.md"
    text = page.read_text()
    page.write_text(text.replace("---\n", "---\nlicense: mit\n", 1) + "\n## Uses\n\nNotes.\n")
    assert verify(page).holds
    page.write_text(text.replace("---\n", "---\nprivacy: {epsilon: 0.1}\n", 1))
    assert "stands twice" in verify(page).reason
    page.write_text(text + text)
    assert "more than one card" in verify(page).reason


def test_an_upload_takes_the_card_along(private, hub):
    assert private.push_to_hub("anna/notes", commit_message="first") == {"commit_message": "first"}
    assert verify(hub / "anna" / "notes" / "README.md", weights=hub / "anna" / "notes").guarantee
    assert not list((hub / "anna" / "notes").glob("*.jsonl"))


@pytest.mark.parametrize(
    ("base", "named"),
    [("/home/anna/secret-project/notes-v2", None), ("anna-co/notes", "anna-co/notes"), ("here", None)],
)
def test_an_adapter_names_its_base_by_a_hub_or_not_at_all(tmp_path, monkeypatch, base, named):
    """No file of the folder holds the path; the adapter still loads over the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    model = build("gpt2")
    model.config._name_or_path = model.name_or_path = base
    adapted = peft.get_peft_model(model.train(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    run = started(adapted, lambda i: {"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i})
    logical_step(run)
    folder = run.save_pretrained(tmp_path / "adapter")
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == named
    assert not [path for path in folder.iterdir() if b"secret-project" in path.read_bytes()]
    again = peft.PeftModel.from_pretrained(build("gpt2"), str(folder))
    wanted = {name: p for name, p in adapted.named_parameters() if "lora" in name}
    assert all(torch.equal(p, wanted[name]) for name, p in again.named_parameters() if "lora" in name)


def test_a_model_that_cannot_be_saved_so_is_refused_in_a_sentence(tmp_path):
    run = started(Classifier(), lambda i: {"x": torch.randn(5), "labels": i % 3})
    logical_step(run)
    with pytest.raises(ValueError, match="has no save_pretrained"):
        run.save_pretrained(tmp_path / "model")


def test_names_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for given, named in {
        "gpt2": "gpt2",
        "openai-community/gpt2": "openai-community/gpt2",
        "/data/models/llama": "llama",
        "./llama": "llama",
        "../other/llama/": "llama",
        "here": "here",
        "C:\\models\\llama": "C:\\models\\llama".rpartition("\\")[2],
        "a/b/c": "c",
    }.items():
        assert public_name(given) == named, given
