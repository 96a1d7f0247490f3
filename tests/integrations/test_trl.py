"""trl's trainers: SFT packed by the example, DPO by the pair, clipped as their own losses taken alone would be."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
pytest.importorskip("trl", reason="trl is in the optional extra 'trl', for Python 3.11 and later")

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase
from trl import DPOConfig, SFTConfig

import fastdp
from fastdp.integrations.trl import PackingCollator
from tests.cases import cases
from tests.engine.runs import Sums, clipped_sum, error
from tests.private.test_preparation import Drawn
from tests.tokenizers_for_tests import word_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 6,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "max_length": 24,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return word_tokenizer(["[PAD]", "[UNK]", *"abcdefghij"], pad_token="[PAD]", eos_token="[UNK]")


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 12}
    return GPT2LMHeadModel(
        GPT2Config(**size, bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def letters(count: int, start: int) -> str:
    return " ".join("abcdefghij"[(start + i) % 10] for i in range(count))


BUDGET: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-3, "max_physical_batch_size": 5}
CONFIGS: dict[Any, Any] = {fastdp.DPSFTTrainer: SFTConfig, fastdp.DPDPOTrainer: DPOConfig}


def trainer_of(
    kind: Any, path: Path, tokenizer: Any, rows: Any, privacy: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """A trainer of a small model; settings that its arguments lack are the trainer's own."""
    config = next(own for base, own in CONFIGS.items() if issubclass(kind, base))
    known = {name: settings.pop(name) for name in list(settings) if name in config.__dataclass_fields__}
    return kind(
        model=model(),
        args=config(output_dir=str(path), **COMMON | known),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        privacy=fastdp.PrivacyArguments(**BUDGET | (privacy or {})),
        **settings,
    )


def first_release(trainer: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Clipped sums of the first step for which anything was drawn, by the rules, and the examples that were."""
    loader, sums, drawn = trainer.get_train_dataloader(), Sums(), Drawn()
    private = trainer.private
    private.observe(sums)
    private.observe(drawn)
    for batches in loader:
        trainer.training_step(trainer.model, batches)
        private.optimizer.step()
        if drawn.units:
            break
        private.optimizer.zero_grad()
    private.detach()
    assert private.route == "uses"
    return sums.steps[-1], drawn.units


def gradients(losses: list[Any], policy: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    names = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    return [dict(zip(names, torch.autograd.grad(loss, list(names.values())))) for loss in losses]


def row_means(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Each row's cross-entropy over its own labelled tokens, ``[rows]``."""
    losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)


class Own(fastdp.DPSFTTrainer):
    """Computes the loss from the logits."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        output = model(**inputs)
        loss = row_means(output, labels).mean()
        return (loss, output) if return_outputs else loss


#: Where the loss of an example comes from: the trainer's class, its arguments, and those of its privacy.
SOURCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "model": (fastdp.DPSFTTrainer, {}, {}),
    "subclass": (Own, {}, {}),
    "function": (
        fastdp.DPSFTTrainer,
        {"compute_loss_func": lambda output, labels, num_items_in_batch=None: row_means(output, labels).mean()},
        {},
    ),
    "criterion": (fastdp.DPSFTTrainer, {}, {"criterion": lambda output, batch: row_means(output, batch["labels"])}),
}


@pytest.mark.parametrize(("packing", "source"), [(True, "model"), *((False, source) for source in SOURCES)])
def test_sft_clips_each_example_however_they_are_packed(
    tmp_path: Path, tokenizer: Any, packing: bool, source: str
) -> None:
    kind, options, privacy = SOURCES[source]
    rows = [{"prompt": letters(2, i), "completion": " " + letters(1 + i % 4, i)} for i in range(24)]
    trainer = trainer_of(kind, tmp_path, tokenizer, rows, privacy, packing=packing, **options)
    assert trainer.args.packing == packing
    assert len(trainer.train_dataset) == 24, "what is drawn are examples"
    before = model()
    sums, drawn = first_release(trainer)
    losses = []
    for number in drawn:
        example = trainer.train_dataset[number]
        ids, labels = (torch.tensor([example[name]]) for name in ("input_ids", "labels"))
        losses.append(before(input_ids=ids, labels=labels).loss)
    expected = clipped_sum(gradients(losses, before), 1.0)
    assert error({name: sums[name] for name in expected}, expected) < 1e-4


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_clips_each_pair(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    rows = [
        {"prompt": letters(2, i), "chosen": " " + letters(1 + i % 4, i), "rejected": " " + letters(1 + i % 3, i + 5)}
        for i in range(24)
    ]
    trainer = trainer_of(fastdp.DPDPOTrainer, tmp_path, tokenizer, rows, loss_type=kind)
    policy = model()
    sums, drawn = first_release(trainer)

    def chance(prompt: list[int], end: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + end])
        return policy(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)[range(len(end)), end].sum()

    losses = []
    for number in drawn:
        pair = trainer.train_dataset[number]
        ends = [pair["chosen_ids"], pair["rejected_ids"]]
        ratios = [chance(pair["prompt_ids"], end) for end in ends]
        ratios = [ratio - ratio.detach() for ratio in ratios]
        for end, name in zip(ends, ("chosen", "rejected")):
            assert float(chance(pair["prompt_ids"], end)) == pytest.approx(pair[f"ref_{name}_logps"], rel=1e-5)
        if kind == "ipo":
            losses.append((ratios[0] / len(ends[0]) - ratios[1] / len(ends[1]) - 1 / (2 * 0.1)) ** 2)
        else:
            losses.append(-F.logsigmoid(0.1 * (ratios[0] - ratios[1])))
    expected = clipped_sum(gradients(losses, policy), 1.0)
    assert error({name.removeprefix("model."): total for name, total in sums.items()}, expected) < 1e-4


def test_labels_are_smoothed_unless_rows_are_packed(tmp_path: Path, tokenizer: Any) -> None:
    def trainer(packing: bool) -> Any:
        rows = [{"text": letters(4, i)} for i in range(24)]
        options: dict[str, Any] = {"packing": packing, "label_smoothing_factor": 0.1}
        return trainer_of(fastdp.DPSFTTrainer, tmp_path, tokenizer, rows, **options)

    with pytest.raises(ValueError, match="label_smoothing_factor .* set packing=False"):
        trainer(packing=True).train()
    made = trainer(packing=False)
    made.train()
    assert made.private.route == "uses"
    assert made.private.steps_done == 4


def test_dpo_takes_no_loss_of_the_user_s(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a b", "chosen": " c", "rejected": " d"}] * 12
    own = {"criterion": lambda output, batch: output}
    trainer = trainer_of(fastdp.DPDPOTrainer, tmp_path, tokenizer, rows, own)
    with pytest.raises(ValueError, match="computes the losses of pairs itself. Leave criterion"):
        trainer.get_train_dataloader()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pairs_in_bf16_take_the_rules(tmp_path: Path, tokenizer: Any, checkpointing: bool) -> None:
    # accelerate casts within the policy's own forward, so that the engine's comparison sees bf16 whatever it asks for.
    rows = [{"prompt": letters(2, i), "chosen": " b", "rejected": " " + letters(2, i)} for i in range(24)]
    options: dict[str, Any] = {"bf16": True, "gradient_checkpointing": checkpointing}
    first_release(trainer_of(fastdp.DPDPOTrainer, tmp_path, tokenizer, rows, **options))


def test_sft_trains_evaluates_and_resumes(tmp_path: Path, tokenizer: Any) -> None:
    def trainer() -> Any:
        rows = [{"text": letters(3 + i % 5, i)} for i in range(24)]
        own = {"eval_dataset": Dataset.from_list(rows[:4]), "peft_config": LoraConfig(r=2, task_type="CAUSAL_LM")}
        options: dict[str, Any] = {"packing": True, "save_steps": 2, "eval_strategy": "epoch"}
        return trainer_of(fastdp.DPSFTTrainer, tmp_path, tokenizer, rows, **own, **options)

    made = trainer()
    made.train()
    assert made.private is not None
    assert made.private.steps_done == 4
    logged = {key for entry in made.state.log_history for key in entry}
    assert {"unprotected_loss", "epsilon", "eval_loss"} <= logged
    assert not logged & {"loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy"}
    with pytest.raises(fastdp.accounting.BudgetExceeded):
        trainer().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@cases(
    ("kind", "setting", "value"),
    [
        ("sft", "loss_type", "dft"),
        ("sft", "padding_free", True),
        ("sft", "activation_offloading", True),
        ("dpo", "loss_type", "hinge"),
        ("dpo", "ld_alpha", 0.5),
        ("dpo", "f_divergence_type", "js_divergence"),
        ("dpo", "use_weighting", True),
        ("dpo", "gradient_accumulation_steps", 2),
        ("dpo", "label_smoothing_factor", 0.1),
    ],
)
def test_settings_whose_losses_would_be_others_are_refused(tmp_path: Path, kind: str, setting: str, value: Any) -> None:
    trainer: Any = {"sft": fastdp.DPSFTTrainer, "dpo": fastdp.DPDPOTrainer}[kind]
    with pytest.raises(ValueError, match=setting):
        trainer_of(trainer, tmp_path, None, [{}], **{setting: value})


TEXT, PAIR = {"text": "a b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@cases(
    ("kind", "rows", "said", "settings"),
    [
        ("sft", [TEXT], "dataset_text_field is 'body', which no example has: its columns are text", ("body",)),
        ("sft", [{"completion": "a"}], "dataset_text_field is 'text', which no example has", ()),
        ("sft", [{"prompt": "a"}], "train_dataset needs 'completion', which no example has", ()),
        ("sft", [TEXT, {"text": None}], "'text' of row 1 in train_dataset is no text: leave it out", ()),
        ("sft", [{"text": 3}], "'text' of row 0 in train_dataset is no text", ()),
        ("sft", [MESSAGES], "The tokenizer has no chat template. Set it", ()),
        ("sft", [], "train_dataset holds no example", ()),
        ("dpo", [TEXT], "train_dataset needs 'chosen', which no example has", ()),
        (
            "dpo",
            [{"prompt": "a", "chosen": "b"}],
            "needs 'rejected', which no example has: its columns are prompt, chosen",
            (),
        ),
        ("dpo", [{**PAIR, "chosen": 3}], "'chosen' of row 0 in train_dataset is no text", ()),
    ],
)
def test_rows_that_trl_cannot_read_are_named(
    tmp_path: Path, tokenizer: Any, kind: str, rows: Any, said: str, settings: tuple[str, ...]
) -> None:
    trainer: Any = {"sft": fastdp.DPSFTTrainer, "dpo": fastdp.DPDPOTrainer}[kind]
    with pytest.raises(ValueError, match=said):
        trainer_of(trainer, tmp_path, tokenizer, rows, **dict(zip(["dataset_text_field"], settings)))


def test_rows_without_an_answer_are_counted(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "a " * (200 if i % 3 == 0 else 1), "completion": " b"} for i in range(18)]
    with pytest.warns(UserWarning, match="6 of 18 rows of train_dataset have no token to learn within max_length"):
        trainer = trainer_of(fastdp.DPSFTTrainer, tmp_path, tokenizer, rows)
    assert len(trainer.train_dataset) == 12


def test_packing_keeps_examples_whole_and_numbers_their_tokens() -> None:
    examples = [{"input_ids": [9] * n, "labels": [-100] + [9] * (n - 1)} for n in (3, 4, 2, 9, 1)]
    packed = PackingCollator(pad_token_id=0, max_length=7)(examples)
    assert packed["token_units"].tolist() == [
        [0, 0, 0, 1, 1, 1, 1, -1, -1],
        [2, 2, -1, -1, -1, -1, -1, -1, -1],
        [3] * 9,
        [4, -1, -1, -1, -1, -1, -1, -1, -1],
    ]
    assert packed["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 0]
    assert packed["labels"][0].tolist() == [-100, 9, 9, -100, 9, 9, 9, -100, -100]
    assert packed["input_ids"].shape == packed["labels"].shape == (4, 9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trl_sft", "trl_dpo"])
def test_an_example_trains_and_plain_peft_loads_what_it_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--output", str(tmp_path), "--examples", "24", "--batch", "6", "--epochs", "0.5"]
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "gives the same logits: True" in capsys.readouterr().out
    assert fastdp.accounting.verify(tmp_path / "card.json").guarantee
