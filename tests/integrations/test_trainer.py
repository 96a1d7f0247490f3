"""DPTrainer: each of Trainer's steps is one release, and nothing private is logged or saved."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2LMHeadModel,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainingArguments,
)

import fastdp
from fastdp.engine.errors import SelfCheckError
from fastdp.integrations.trainer import STATE_FILE
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import Sums, error
from tests.private.test_publish import Hub

ROWS = 24


def examples(users: bool = False) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (ROWS, 9), generator=generator).tolist()
    columns: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if users:
        columns["user"] = [f"user {i % 8}" for i in range(ROWS)]
    return Dataset.from_dict(columns)


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert "user" not in items[0], "user ids are not for the model"
    return {key: torch.tensor([item[key] for item in items]) for key in items[0]}


def trainer(
    path: Path,
    privacy: dict[str, Any] | None = None,
    users: bool = False,
    kind: Any = fastdp.DPTrainer,
    model: str = "gpt2",
    own: dict[str, Any] | None = None,
    **options: Any,
) -> fastdp.DPTrainer:
    """A trainer; ``own`` are arguments of its own, and further ones are those of its training arguments."""
    arguments = Seq2SeqTrainingArguments if issubclass(kind, fastdp.DPSeq2SeqTrainer) else TrainingArguments
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 6,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    budget = {"noise_multiplier": 1.0, "target_delta": 1e-3, "max_physical_batch_size": 4, **(privacy or {})}
    return kind(
        model=build(model),
        args=arguments(output_dir=str(path), **settings),
        train_dataset=examples(users),
        data_collator=collate,
        privacy=fastdp.PrivacyArguments(**budget),
        **(own or {}),
    )


def test_a_model_that_is_saved_or_pushed_has_its_card_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "folder", tmp_path / "hub", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    run = trainer(tmp_path / "notes", num_train_epochs=1)
    run.train()
    run.push_to_hub()
    pushed = tmp_path / "hub" / "notes"
    assert fastdp.accounting.verify(pushed / "README.md", weights=pushed).guarantee
    # What no guarantee covers stays.
    assert not {"ledger.jsonl", "trainer_state.json", "training_args.bin"} & {path.name for path in pushed.rglob("*")}
    assert not (tmp_path / "notes" / "checkpoint-3" / "README.md").exists()
    plain, batch = GPT2LMHeadModel.from_pretrained(pushed).eval(), collate([examples()[0]])
    with torch.no_grad():
        assert torch.equal(plain(**batch).logits, run.model.eval()(**batch).logits)


def test_a_run_spends_its_budget_and_leaves_a_card(tmp_path: Path) -> None:
    settings = {"noise_rounds": 12, "shapes": "public", "max_physical_batch_size": 6}
    made = trainer(tmp_path, privacy=settings, skip_memory_metrics=False)
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    output = made.train()
    private = made.private
    assert private is not None
    assert made.state.global_step == private.steps_done == private.total_steps == 8
    assert any(not torch.equal(p, before[name]) for name, p in made.model.named_parameters())
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["epsilon"]["upper_bound"] == pytest.approx(private.epsilon())
    assert card["steps"] == {"planned": 8, "spent": 8}
    assert card["noise_source"]["generator"] == "ChaCha12"
    assert any("one unit changes no bit" in said for said in card["remaining"])
    # What is not private is not logged, or is marked; the number of operations is that of the tokens drawn.
    logged = {key for entry in made.state.log_history for key in entry}
    assert not {key for key in logged if key in ("loss", "grad_norm") or key.startswith("train_")}
    assert {
        "unprotected_loss",
        "epsilon",
        "unprotected_train_runtime",
        "unprotected_train_mem_cpu_peaked_delta",
    } <= logged
    spent = [entry["epsilon"] for entry in made.state.log_history if "epsilon" in entry]
    assert spent == sorted(spent)
    assert made.state.total_flos == output.metrics["total_flos"] == 0
    for checkpoint in tmp_path.glob("checkpoint-*"):
        state = (checkpoint / "trainer_state.json").read_text()
        assert "grad_norm" not in state
        assert json.loads(state)["total_flos"] == 0
        assert (checkpoint / STATE_FILE).stat().st_mode & 0o077 == 0
        assert checkpoint.stat().st_mode & 0o077 == 0, "others read the log of losses"


@pytest.mark.parametrize("together", [False, True])
def test_what_compute_loss_makes_of_a_batch_is_tried(tmp_path: Path, together: bool) -> None:
    class Rolling(fastdp.DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            labels = inputs["input_ids"].roll(1, 0 if together else 1)
            return super().compute_loss(model, {**inputs, "labels": labels}, *args, **kwargs)

    # A Poisson sample may hold one example, of which nothing is rolled.
    private = trainer(tmp_path, {"sampling": "shuffled"}, kind=Rolling, num_train_epochs=1)
    with pytest.raises(SelfCheckError, match="something else for an example") if together else nullcontext():
        private.train()
    assert private.private.steps_done == (0 if together else 4)


def test_a_run_cut_short_resumes_within_its_target(tmp_path: Path) -> None:
    class Stop(RuntimeError):
        pass

    made = trainer(tmp_path)
    original = made.training_step

    def failing(*args: Any, **kwargs: Any) -> torch.Tensor:
        if made.state.global_step == 5:
            raise Stop
        return original(*args, **kwargs)

    made.training_step = failing  # type: ignore[method-assign]
    with pytest.raises(Stop):
        made.train()
    # The interrupted run let go of its ledger, so the same process may resume it.
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.private is not None
    assert again.private.steps_done == 8
    # Five were released before the interruption, so three were left.
    assert again.state.global_step == 3 + 3


def test_users_are_the_unit_and_their_column_reaches_no_batch(tmp_path: Path) -> None:
    made = trainer(
        tmp_path,
        {"user_id_column": "user", "max_examples_per_user": 2},
        users=True,
        per_device_train_batch_size=4,
        max_steps=3,
    )
    made.train()
    assert made.private is not None
    assert made.private.sample_rate == 4 / 8
    assert made.private.total_steps == made.private.steps_done == 3


@cases(
    ("option", "value"),
    [
        ("gradient_accumulation_steps", 2),
        ("auto_find_batch_size", True),
        ("neftune_noise_alpha", 5.0),
        ("include_num_input_tokens_seen", "non_padding"),
        ("label_smoothing_factor", 2.0),
    ],
)
def test_arguments_that_would_break_the_guarantee_are_refused(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        trainer(tmp_path, **{option: value})


def test_what_would_drop_rows_has_no_effect_and_ends_early_are_said(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    run = trainer(tmp_path, dataloader_drop_last=True)
    run.add_callback(Stop())
    with pytest.warns(UserWarning, match="releases paid for were made") as caught:
        run.train()
    said = [str(entry.message) for entry in caught]
    assert sum("drop_last=True has no effect" in text for text in said) == 1
    assert run.private is not None
    early = f"1 of {run.private.total_steps} releases paid for were made. Training ended early: set num_train_epochs"
    assert sum(text.startswith(early) for text in said) == 1


def own_loss(logits: torch.Tensor, labels: torch.Tensor, weight: Any = None, reduction: str = "none") -> torch.Tensor:
    """Cross-entropy of each row's next tokens, ``[rows]``, or torch's own mean."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], weight=weight, reduction=reduction
    )
    return losses.mean(1) if reduction == "none" else losses


class FromLogits(fastdp.DPTrainer):
    """Takes the labels away from the model, as scripts with a loss of their own do."""

    weight: Any = None
    reduction = "none"

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = own_loss(outputs.logits, labels, self.weight, self.reduction).mean()
        return (loss, outputs) if return_outputs else loss


class BesideLabels(fastdp.DPTrainer):
    """Hands the model the labels, and does not use its loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = own_loss(outputs.logits, inputs["labels"]).mean()
        return (loss, outputs) if return_outputs else loss


def first_release(made: fastdp.DPTrainer) -> dict[str, torch.Tensor]:
    """The clipped sums of the run's first logical batch, over its bound."""
    made.get_train_dataloader()
    made.private.observe(sums := Sums())
    made.train()
    assert made.private.route == "uses"
    assert made.private.steps_done == made.private.total_steps
    return sums.steps[0]


def test_smoothed_losses_are_means_over_a_rows_own_labels(tmp_path: Path) -> None:
    made = trainer(tmp_path, label_smoothing_factor=0.3)
    logits, labels = torch.randn(3, 9, 60), torch.randint(0, 60, (3, 9))
    labels[0, 4:], labels[1] = -100, -100
    found = made.smoothed_losses({"logits": logits}, {"labels": labels})
    own = [made.label_smoother({"logits": logits[i : i + 1]}, labels[i : i + 1], shift_labels=True) for i in (0, 2)]
    assert torch.allclose(found[[0, 2]], torch.stack(own))
    assert found[1] == 0


def test_a_subclass_may_compute_the_loss(tmp_path: Path) -> None:
    """A loss by the row gives what the model's own loss gives: means over each row's tokens."""
    options = {"num_train_epochs": 1, "per_device_train_batch_size": ROWS}
    privacy = {"sampling": "shuffled", "max_physical_batch_size": ROWS, "method": fastdp.DPSGD(max_grad_norm=0.5)}
    sums = []
    for number, kind in enumerate((fastdp.DPTrainer, FromLogits, BesideLabels)):
        torch.manual_seed(0)
        made = trainer(tmp_path / str(number), privacy, kind=kind, **options)
        for module in made.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        sums.append(first_release(made))
        assert math.isfinite(made.evaluate(examples())["eval_loss"])
    assert all(error(own, sums[0]) < 1e-4 for own in sums[1:])


def test_a_loss_function_is_given_the_number_of_labels(tmp_path: Path) -> None:
    """As Trainer counts them; of rows of one length its quotient is a mean over rows."""

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        assert num_items_in_batch == labels.numel()
        return own_loss(outputs["logits"], labels).sum() * labels.shape[1] / num_items_in_batch

    first_release(trainer(tmp_path, own={"compute_loss_func": loss}, num_train_epochs=1))


def test_a_loss_over_the_whole_batch_is_refused_in_the_trainer_s_words(tmp_path: Path) -> None:
    made = trainer(tmp_path, kind=FromLogits)
    made.weight, made.reduction = torch.rand(made.model.config.vocab_size), "mean"
    with pytest.raises(SelfCheckError, match=r"cross_entropy with weight= .* give PrivacyArguments criterion="):
        made.train()
    assert made.private.steps_done == 0


def test_a_criterion_beside_a_loss_of_ones_own_is_said_to_train(tmp_path: Path, caplog: Any) -> None:
    def criterion(output: Any, batch: Any) -> torch.Tensor:
        return output.logits.float().square().mean((1, 2))

    made = trainer(tmp_path, {"criterion": criterion}, kind=FromLogits, max_steps=1)
    made.train()
    assert "criterion makes the training loss" in caplog.text


class NewOptimizer(fastdp.DPTrainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        return self.optimizer


def test_model_and_optimizer_may_be_made_anew_for_each_training(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    made = trainer(tmp_path, kind=NewOptimizer, own={"callbacks": [Stop()]})
    made.model_init = lambda: build("gpt2")
    with pytest.warns(UserWarning, match="3 of 8 releases"):
        made.train()
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert made.private is not None
    assert made.private.steps_done == 8


def test_a_search_of_hyperparameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget in each trial"):
        trainer(tmp_path).hyperparameter_search()


def test_refusals_name_the_arguments_of_a_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, num_train_epochs=1)
    for where, folder in ((True, tmp_path), ("/none", "/none")):
        with pytest.raises(ValueError, match=f"^{folder} holds no checkpoint: leave resume_from_checkpoint out"):
            made.train(resume_from_checkpoint=where)
    made.train()
    before = {name: p.detach().clone() for name, p in made.model.named_parameters()}
    for again in (made, trainer(tmp_path, num_train_epochs=1)):
        with pytest.raises(
            ValueError, match="already holds a run's ledger.*pass resume_from_checkpoint=True to continue"
        ):
            again.train()
    assert all(torch.equal(before[name], p) for name, p in made.model.named_parameters())

    class Besides(fastdp.DPTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            return outputs.loss + 0.1 * outputs.logits.square().mean()

    besides = trainer(tmp_path / "besides", kind=Besides, privacy={"keep_logits": True})
    besides.train()
    assert besides.private.route == "uses"


def test_a_sequence_to_sequence_trainer_evaluates_what_it_generates(tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"length": float(prediction.predictions.shape[1])}

    how = {"eval_strategy": "epoch", "predict_with_generate": True, "generation_max_length": 5, "num_train_epochs": 1}
    own = {"eval_dataset": examples().select(range(4)), "compute_metrics": metrics}
    made = trainer(tmp_path, kind=fastdp.DPSeq2SeqTrainer, model="t5", own=own, **how)
    made.train()
    assert made.private.steps_done == 4
    assert [shape[0] for shape in seen] == [4]
    assert (tmp_path / "card.json").exists()


@pytest.mark.parametrize("column", [True, False])
def test_grouping_by_length_orders_micro_batches(tmp_path: Path, column: bool) -> None:
    # Earlier releases of transformers 5 have a flag instead of the strategy.
    strategy = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    made = trainer(
        tmp_path, **({"train_sampling_strategy": "group_by_length"} if strategy else {"group_by_length": True})
    )
    if column:
        made.train_dataset = made.train_dataset.add_column("length", [i % 7 for i in range(ROWS)])
    loader = made.get_train_dataloader().private.data_loader
    assert list(loader.lengths) == ([i % 7 for i in range(ROWS)] if column else [9] * ROWS)
    if column:
        indices = [i for piece, _ in loader.micro_batches(list(range(ROWS))) for i in piece]
        assert [i % 7 for i in indices] == sorted((i % 7 for i in range(ROWS)), reverse=True)


def test_a_column_of_users_that_is_not_there_and_a_bound_of_trainer_s_own_are_named(tmp_path: Path) -> None:
    made = trainer(tmp_path, privacy={"user_id_column": "patient", "max_examples_per_user": 1})
    with pytest.raises(ValueError, match="user_id_column is 'patient', which no example has: name one of input_ids"):
        made.train()
    with pytest.warns(UserWarning, match="max_grad_norm has no effect: set method="):
        trainer(tmp_path, max_grad_norm=0.5)


def test_data_without_an_example_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.train_dataset = []
    with pytest.raises(ValueError, match="train_dataset holds no example"):
        made.train()


def test_generation_needs_the_trainer_for_it(tmp_path: Path) -> None:
    settings = Seq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, report_to="none")
    with pytest.raises(ValueError, match="predict_with_generate .* use DPSeq2SeqTrainer"):
        fastdp.DPTrainer(
            model=torch.nn.Linear(2, 2), args=settings, privacy=fastdp.PrivacyArguments(noise_multiplier=1.0)
        )


@pytest.mark.skipif(not hasattr(transformers.optimization, "GreedyLR"), reason="older transformers have no GreedyLR")
def test_a_schedule_of_transformers_that_reads_a_figure_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, lr_scheduler_type="greedy", eval_strategy="epoch", own={"eval_dataset": examples()})
    with pytest.raises(ValueError, match="GreedyLR sets the learning rate by a figure"):
        made.train()
    assert made.private.steps_done == 0


@pytest.mark.parametrize("way", ["best", "early", "neither"])
@pytest.mark.filterwarnings("ignore:Using EarlyStoppingCallback")
def test_the_card_says_that_a_checkpoint_was_chosen(tmp_path: Path, way: str) -> None:
    how = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss", "num_train_epochs": 1}
    own = {"eval_dataset": examples(), "callbacks": [EarlyStoppingCallback(1)] if way == "early" else []}
    made = trainer(tmp_path, own=own, load_best_model_at_end=way == "best", **how)
    made.train()
    said = [s for s in json.loads((tmp_path / "card.json").read_text())["assumptions"] if "which checkpoint" in s]
    assert len(said) == (way != "neither")


def test_what_is_written_of_training_is_marked_and_its_owners(tmp_path: Path) -> None:
    """As the example scripts of transformers write it, beside the weights."""
    made = trainer(tmp_path, num_train_epochs=1)
    made.save_metrics("train", made.train().metrics)
    assert "eval_loss" in made.evaluate(made.train_dataset)
    logged = {key for entry in made.state.log_history for key in entry}
    assert "unprotected_eval_loss" in logged
    assert "eval_loss" not in logged
    made.save_state()
    for name in ("train_results.json", "all_results.json", "trainer_state.json"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
        assert '"train_loss"' not in (tmp_path / name).read_text()
    assert "unprotected_train_loss" in json.loads((tmp_path / "train_results.json").read_text())
