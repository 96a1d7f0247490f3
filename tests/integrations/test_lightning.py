"""Lightning's Trainer, automatic and manual: every micro-batch is trained on, and every release is the same."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="lightning is in the optional extra 'lightning'")

import lightning
import torch

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.integrations.lightning import Batches
from tests.engine.runs import Classifier, start

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_loop.py"


@pytest.mark.parametrize("manual", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_example_spends_its_budget(
    manual: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["loop", "--rows", "256", "--epochs", "2", "--output", str(tmp_path)] + ["--manual"] * manual
    )
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "after 4 of 4 releases" in capsys.readouterr().out
    assert fastdp.accounting.verify(tmp_path / "card.json", ledger=tmp_path / "ledger.jsonl").guarantee
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["privacy"]["steps_done"] == 4
    # The schedule advanced once a release, however many micro-batches there were.
    assert saved["lr_schedulers"][0]["last_epoch"] == 4


class Centring(lightning.LightningModule):
    """Makes something of each batch before it calls the model: of all its rows, or of each alone."""

    def __init__(self, private: fastdp.Private, together: bool):
        super().__init__()
        self.model, self.private, self.together = private.model, private, together

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        centre = batch["x"].mean(0 if self.together else 1, keepdim=True)
        loss: torch.Tensor = self.model(**{**batch, "x": batch["x"] - centre})["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer


def test_accumulation_is_refused_before_a_release() -> None:
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, accumulate_grad_batches=2, **options)
    with pytest.raises(RuntimeError, match=r"step\(\) did not follow backward\(\)"):
        trainer.fit(Centring(private, together=False), Batches(private))
    assert private.steps_done == 0


@pytest.mark.parametrize("together", [False, True])
def test_what_a_training_step_makes_of_a_batch_is_tried_before_the_first(tmp_path: Path, together: bool) -> None:
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=3)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", enable_model_summary=False, **options
    )
    with pytest.raises(SelfCheckError, match="something else for an example") if together else nullcontext():
        trainer.fit(Centring(private, together), Batches(private))
    assert private.steps_done == (0 if together else private.steps_per_epoch)


class Counting(lightning.LightningModule):
    """Calls the model with what it is given."""

    def __init__(self, private: fastdp.Private):
        super().__init__()
        self.model, self.private, self.sizes = private.model, private, list[int]()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.sizes.append(len(batch["x"]))
        loss: torch.Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer


def test_a_training_step_that_makes_nothing_gets_four_batches_more(tmp_path: Path) -> None:
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=3)
    drawn: list[int] = []
    draw = private.data_loader.micro_batches
    private.data_loader.micro_batches = lambda units: ((drawn.append(len(i)), (i, t))[1] for i, t in draw(units))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", enable_model_summary=False, **options
    )
    trainer.fit(module := Counting(private), Batches(private))
    assert module.sizes == [1, 3, 3, 3, *drawn]
    assert private.steps_done == private.steps_per_epoch


class Skipping(lightning.LightningModule):
    """Leaves a batch out, as a training step may that returns nothing."""

    def __init__(self, private: fastdp.Private, skipped: int):
        super().__init__()
        self.model, self.private, self.skipped = private.model, private, skipped

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor | None:
        loss = self.model(**batch)["loss"]
        return None if index == self.skipped else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_batch_that_is_skipped_is_never_taken_for_the_next(tmp_path: Path, skipped: int) -> None:
    """Its examples would join the logical batch after, and one that is in both would count twice."""
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=3)
    trainer = lightning.Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError, match="skipped|without backward"):
        trainer.fit(Skipping(private, skipped), Batches(private))
    assert private.steps_done == 0


def test_a_skipped_batch_is_found_by_the_tickets() -> None:
    private = start(Classifier(), noise_multiplier=1.0, target_delta=1e-3, max_physical_batch_size=3)
    batches = iter(Batches(private))
    next(batches)
    ahead = next(batches)
    with pytest.raises(RuntimeError, match="a batch was skipped"):
        next(batches)
    assert ahead is not None
    assert not private.data_loader.look_ahead


class Outside(lightning.LightningModule):
    """Computes its loss from the model's outputs."""

    def __init__(self, private: fastdp.Private):
        super().__init__()
        self.model, self.private = private.model, private

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer


def test_no_release_holds_two_logical_batches(tmp_path: Path) -> None:
    """The loop is verified again while the next batch is out already: it joined this one's release, and one was missing."""
    data = torch.utils.data.TensorDataset(torch.rand(24, 12), torch.arange(24) % 3)
    model = torch.nn.Linear(12, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    options = {"loss_reduction": "mean", "noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 1}
    private = fastdp.make_private(model, optimizer, loader, **options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, default_root_dir=tmp_path, accelerator="cpu", enable_model_summary=False, **quiet
    )
    trainer.fit(Outside(private), Batches(private))
    assert private.steps_done == private.total_steps == 3
