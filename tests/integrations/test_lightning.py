"""Lightning's Trainer, automatic and manual: every micro-batch is trained on, and every release is the same."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

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


class Module(lightning.LightningModule):
    """A training step that is a function of the model, the batch and its number."""

    def __init__(self, private: fastdp.Private, step: Callable[[Any, Any, int], Any] = lambda m, b, i: m(**b)["loss"]):
        super().__init__()
        self.model, self.private, self.step = private.model, private, step

    def training_step(self, batch: Any, index: int) -> Any:
        return self.step(self.model, batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.private.optimizer


def centring(axis: int) -> Callable[[Any, Any, int], Any]:
    """Takes a mean off what the model is called with: of the whole batch along the first axis, of each row along the other."""
    return lambda model, batch, index: model(**{**batch, "x": batch["x"] - batch["x"].mean(axis, keepdim=True)})["loss"]


def fit(module: Module, **options: Any) -> None:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(accelerator="cpu", max_epochs=1, **quiet, **options).fit(module, Batches(module.private))


PRIVACY: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3}


def test_accumulation_is_refused_before_a_release() -> None:
    private = start(Classifier(), **PRIVACY)
    with pytest.raises(RuntimeError, match=r"optimizer did not follow backward\(\)"):
        fit(Module(private, centring(1)), accumulate_grad_batches=2)
    assert private.steps_done == 0


@pytest.mark.parametrize("together", [False, True])
def test_what_a_training_step_makes_of_a_batch_is_tried_before_the_first(together: bool) -> None:
    private = start(Classifier(), max_physical_batch_size=3, **PRIVACY)
    with pytest.raises(SelfCheckError, match="something else for an example") if together else nullcontext():
        fit(Module(private, centring(0 if together else 1)))
    assert private.steps_done == (0 if together else private.steps_per_epoch)


def test_a_training_step_that_makes_nothing_gets_four_batches_more() -> None:
    private = start(Classifier(), max_physical_batch_size=3, **PRIVACY)
    drawn: list[int] = []
    sizes: list[int] = []
    draw = private.data_loader.micro_batches
    private.data_loader.micro_batches = lambda units: ((drawn.append(len(i)), (i, t))[1] for i, t in draw(units))
    fit(Module(private, lambda model, batch, index: (sizes.append(len(batch["x"])), model(**batch)["loss"])[1]))
    assert sizes == [2, 3, 3, 3, *drawn]
    assert private.steps_done == private.steps_per_epoch


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_batch_that_is_skipped_is_never_taken_for_the_next(skipped: int) -> None:
    """Its examples would join the logical batch after, and one that is in both would count twice."""
    private = start(Classifier(), max_physical_batch_size=3, **PRIVACY)

    def skip(model: Any, batch: Any, index: int) -> Any:
        loss = model(**batch)["loss"]
        return None if index == skipped else loss

    with pytest.raises(RuntimeError, match="skipped|without backward"):
        fit(Module(private, skip))
    assert private.steps_done == 0


def test_a_skipped_batch_is_found_by_the_tickets() -> None:
    private = start(Classifier(), max_physical_batch_size=3, **PRIVACY)
    batches = iter(Batches(private))
    next(batches)
    ahead = next(batches)
    with pytest.raises(RuntimeError, match="a batch was skipped"):
        next(batches)
    assert ahead is not None
    assert not private.data_loader.look_ahead


def test_no_release_holds_two_logical_batches() -> None:
    """The loop is verified again while the next batch is out already: it joined this one's release, and one was missing."""
    data = torch.utils.data.TensorDataset(torch.rand(24, 12), torch.arange(24) % 3)
    model = torch.nn.Linear(12, 3)
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = fastdp.make_private(model, optimizer, loader, loss_reduction="mean", epochs=1, **PRIVACY)
    fit(Module(private, lambda model, batch, index: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])))
    assert private.steps_done == private.total_steps == 3
