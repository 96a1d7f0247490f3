"""Trainers of transformers, trl and Lightning, and accelerate."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf

import fastdp

from .adapters import adapted, lora
from .draws import Flipped
from .harness import BATCH, Case, Run, program, register
from .kit import (
    CLASSES,
    MEAN,
    bert,
    causal,
    classify,
    convnet,
    crossentropy,
    gpt2,
    id_rows,
    labelled,
    llama,
    pair_rows,
    pictures,
    t5,
    texts,
    tokenizer,
    translate,
)

QUIET = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 100}


def privacy(**options: Any) -> Any:
    """The settings of a private trainer."""
    return fastdp.PrivacyArguments(noise_multiplier=1.0, target_delta=1e-3, **options)


def train(
    run: Run, names: tuple[str, str], plain_module: Any, arguments: Any, settings: dict[str, Any], **given: Any
) -> None:
    """Train with the private trainer of a name, or with the plain one."""
    private_name, plain_name = names
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"per_device_train_batch_size": BATCH, "num_train_epochs": 1, "seed": torch.initial_seed() % 2**31}
        args = arguments(output_dir=folder, **{**QUIET, **sizes, **settings})
        options = given.pop("privacy", {})
        if run.is_private:
            trainer = getattr(fastdp, private_name)(args=args, privacy=privacy(**options), **given)
        else:
            trainer = getattr(plain_module, plain_name)(args=args, **given)
        try:
            trainer.train()
        finally:
            run.private = getattr(trainer, "private", None)


def trainer(settings: dict[str, Any] | None = None, model: Any = None, rows: Any = None, **given: Any) -> Case:
    """transformers' Trainer."""
    given = {"train_dataset": rows or labelled(), "data_collator": classify, **given}
    return Case(
        model or bert(),
        None,
        loop=lambda run: train(
            run, ("DPTrainer", "Trainer"), hf, hf.TrainingArguments, settings or {}, model=run.case.model, **given
        ),
    )


EVALUATION = {"eval_strategy": "epoch"}
#: Arguments of a Trainer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two_epochs_schedule": {"num_train_epochs": 2, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "label_smoothing_off_weight_decay": {"weight_decay": 0.01, "max_grad_norm": 1.0},
    "max_steps": {"max_steps": 4},
    "bfloat16_checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "drop_last": {"dataloader_drop_last": True},
    "workers": {"dataloader_num_workers": 2},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "logging": {"logging_steps": 1, "logging_first_step": True},
    "empty_labels_kept": {"remove_unused_columns": False},
}
for _name, _settings in ARGUMENTS.items():
    register(f"trainer_{_name}", lambda settings=_settings: trainer(settings))

#: Arguments that a private Trainer cannot take, and the word that its message must contain.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "label_smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing", "computed over tokens of the whole batch"),
    "accumulation": (
        {"gradient_accumulation_steps": 2},
        "gradient_accumulation",
        "max_physical_batch_size does the same",
    ),
    "tokens_seen": (
        {"include_num_input_tokens_seen": True},
        "include_num_input_tokens_seen",
        "how many tokens were drawn is private",
    ),
    "plateau": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVALUATION},
        "plateau",
        "a metric would choose the rate without noise",
    ),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "length", "the guarantee needs random batches"),
}
for _name, (_settings, _word, _why) in REFUSED.items():
    register(
        f"trainer_{_name}",
        lambda settings=_settings: trainer(settings, eval_dataset=labelled(8)),
        f"refused: {_word}" if _name != "group_by_length" else f"uses or refused: {_word}",
        _why,
    )


@program()
def trainer_evaluation() -> Case:
    """Evaluation each epoch with compute_metrics, the best model loaded at the end."""
    metrics = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}  # noqa: E731
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    settings = {"num_train_epochs": 2, **EVALUATION, **best}
    return trainer(settings, eval_dataset=labelled(8, seed=1), compute_metrics=metrics)


@program()
def trainer_early_stopping() -> Case:
    """EarlyStoppingCallback."""
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    callbacks = [hf.EarlyStoppingCallback(1)]
    return trainer({"num_train_epochs": 2, **EVALUATION, **best}, eval_dataset=labelled(8, seed=1), callbacks=callbacks)


@program()
def trainer_stops_itself() -> Case:
    """A callback stops training after two steps; the rest of the budget is kept, and said."""

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    return trainer(callbacks=[Stop()])


@program()
def trainer_lora_language_model() -> Case:
    """dp-transformers: LoRA of GPT-2, a collator that adds position_ids."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = causal(rows)
        rows_, tokens = batch["input_ids"].shape
        return {**batch, "position_ids": torch.arange(tokens).repeat(rows_, 1)}

    model = adapted(gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True))
    return trainer(model=model, rows=id_rows(), data_collator=collate)


@program()
def trainer_masked_language_model() -> Case:
    """Masking drawn in the collator."""
    rows = [{"input_ids": row["input_ids"]} for row in id_rows()]
    collator = hf.DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.15)
    return trainer(model=bert("MaskedLM"), rows=rows, data_collator=collator)


def weighted(output: Any, batch: Any) -> torch.Tensor:
    """Class weights by the row."""
    weights = torch.tensor([1.0, 2.0, 5.0])
    return F.cross_entropy(output.logits, batch["labels"], weight=weights, reduction="none")


class Weighing(hf.Trainer):
    """A plain Trainer with the same loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(**{k: v for k, v in inputs.items() if k != "labels"})
        loss = weighted(output, inputs).mean()
        return (loss, output) if return_outputs else loss


def _criterion(model: Any = None, **given: Any) -> Case:
    def loop(run: Run) -> None:
        options = {"privacy": {"criterion": weighted}} if run.is_private else {}
        module = type("Module", (), {"Trainer": Weighing})
        rows = {"model": run.case.model, "train_dataset": labelled(), "data_collator": classify}
        train(run, ("DPTrainer", "Trainer"), module, hf.TrainingArguments, {}, **rows, **given, **options)

    return Case(model or bert(), None, loop=loop)


@program()
def trainer_criterion() -> Case:
    """Class weights by PrivacyArguments(criterion=...)."""
    return _criterion()


@program()
def trainer_criterion_without_dropout() -> Case:
    """The same for a model without dropout."""
    return _criterion(bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


@program("uses or refused: compute_loss", "torch's mean divides by the weights of the whole batch")
def trainer_compute_loss() -> Case:
    """A subclass whose compute_loss weighs classes."""

    def loop(run: Run) -> None:
        base = fastdp.DPTrainer if run.is_private else hf.Trainer
        module = type("Module", (), {"Trainer": type("Own", (base,), {"compute_loss": Weighing.compute_loss})})
        fastdp._Own = module.Trainer
        try:
            rows = {"model": run.case.model, "train_dataset": labelled(), "data_collator": classify}
            train(run, ("_Own", "Trainer"), module, hf.TrainingArguments, {}, **rows)
        finally:
            delattr(fastdp, "_Own")

    return Case(bert(), None, loop=loop)


@program()
def trainer_augmented_pictures() -> Case:
    """A vision transformer on pictures that are flipped at random."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=CLASSES))
    draw = lambda: float(torch.rand(()))  # noqa: E731
    return trainer({"remove_unused_columns": False}, model, Flipped(draw), data_collator=pictures)


@program()
def trainer_seq2seq_generation() -> Case:
    """Seq2SeqTrainer with predict_with_generate."""
    settings = {"predict_with_generate": True, "generation_max_length": 6, **EVALUATION}
    given = {"train_dataset": pair_rows(), "eval_dataset": pair_rows(4), "data_collator": translate}
    given["processing_class"] = tokenizer()
    names = ("DPSeq2SeqTrainer", "Seq2SeqTrainer")
    return Case(
        t5(),
        None,
        loop=lambda run: train(run, names, hf, hf.Seq2SeqTrainingArguments, settings, model=run.case.model, **given),
    )


def sft(columns: Callable[[], dict[str, list[Any]]], settings: dict[str, Any] | None = None, **given: Any) -> Case:
    """trl's SFTTrainer."""

    def loop(run: Run) -> None:
        import trl
        from datasets import Dataset

        own = {"max_length": 32, "bf16": False, "gradient_checkpointing": False, **(settings or {})}
        data = {
            "train_dataset": Dataset.from_dict(columns()),
            "processing_class": given.pop("processing_class", None) or words(),
        }
        names = ("DPSFTTrainer", "SFTTrainer")
        train(run, names, trl, trl.SFTConfig, own, model=run.case.model, **data, **given)

    return Case(llama(), None, loop=loop)


def words() -> Any:
    """A tokenizer of whole words, with a chat template."""
    found = copy.deepcopy(tokenizer(pair=False))
    found.chat_template = (
        "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' [SEP] ' }}{% endgeneration %}"
        "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    )
    return found


def _pairs() -> dict[str, list[Any]]:
    return {"prompt": texts(high=6), "completion": [" " + text for text in texts(high=6, seed=1)]}


def _messages() -> dict[str, list[Any]]:
    roles = ("user", "assistant")
    talks = zip(texts(high=6), texts(high=6, seed=1))
    return {"messages": [[{"role": r, "content": c} for r, c in zip(roles, talk)] for talk in talks]}


#: Data and settings of supervised fine-tuning.
SFT: dict[str, tuple[Callable[[], dict[str, list[Any]]], dict[str, Any]]] = {
    "texts": (lambda: {"text": texts()}, {}),
    "completions": (_pairs, {"completion_only_loss": True}),
    "messages": (_messages, {}),
    "messages_assistant_only": (_messages, {"assistant_only_loss": True}),
    "packed": (lambda: {"text": texts()}, {"packing": True, "max_length": 16}),
}
for _name, (_columns, _settings) in SFT.items():
    register(f"sft_{_name}", lambda c=_columns, s=_settings: sft(c, s), tags=("trl",))


@program(tags=("trl",))
def sft_lora() -> Case:
    """SFT with peft_config."""
    return sft(lambda: {"text": texts()}, peft_config=lora())


@program(tags=("trl",))
def dpo_lora() -> Case:
    """DPO of adapters."""

    def loop(run: Run) -> None:
        import trl
        from datasets import Dataset

        columns = {"prompt": texts(high=5), "chosen": texts(high=5, seed=1), "rejected": texts(high=5, seed=2)}
        settings = {"max_length": 32, "bf16": False, "gradient_checkpointing": False}
        data = {"train_dataset": Dataset.from_dict(columns), "processing_class": words(), "peft_config": lora()}
        train(run, ("DPDPOTrainer", "DPOTrainer"), trl, trl.DPOConfig, settings, model=run.case.model, **data)

    return Case(llama(), None, loop=loop)


def lightning(wrapped: bool, manual: bool = False, criterion: bool = False) -> Case:
    """Lightning's Trainer around a model of transformers."""

    def loop(run: Run) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.automatic_optimization = bert(), not manual

            def forward(self, **batch: Any) -> Any:
                return self.model(**batch)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                loss = self(**batch).loss
                self.log("train_loss", loss.detach())
                if manual:
                    optimizer = self.optimizers()
                    self.manual_backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                return loss

            def validation_step(self, batch: Any, index: int) -> None:
                self.log("validation_loss", self(**batch).loss)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return self.optimizer

        module = Module()
        module.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        _, _, loader = run.start(module, module.optimizer)
        if run.is_private and wrapped:
            from fastdp.integrations.lightning import Batches

            loader = Batches(run.private)
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        fit = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
        fit.fit(module, loader, torch.utils.data.DataLoader(labelled(8), BATCH, collate_fn=classify))

    return Case(bert(), labelled(), classify, loop=loop)


@program(tags=("lightning",))
def lightning_batches() -> Case:
    """Automatic optimization over Batches(private), as documented."""
    return lightning(True)


@program(tags=("lightning",))
def lightning_manual() -> Case:
    """Manual optimization over Batches(private)."""
    return lightning(True, manual=True)


@program("uses or refused: Batches", "Lightning takes a loader's length for a number of batches", tags=("lightning",))
def lightning_loader() -> Case:
    """The private loader itself is given to fit."""
    return lightning(False)


def accelerated(after: bool, accumulate: int = 1) -> Case:
    """accelerate's loop, prepare before or after make_private."""

    def loop(run: Run) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        case = run.case
        parts: tuple[Any, Any, Any] = (case.model, case.make_optimizer(), case.make_loader())
        if after:
            parts = run.start(*parts)
        model, optimizer, loader = accelerator.prepare(*parts)
        if not after:
            model, optimizer, loader = run.start(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.gather_for_metrics(torch.ones(2))
        accelerator.unwrap_model(model)

    return Case(bert(), labelled(), classify, loop=loop)


register("accelerate_prepared_before", lambda: accelerated(False), tags=("accelerate",))
register("accelerate_prepared_after", lambda: accelerated(True), tags=("accelerate",))
register(
    "accelerate_accumulation",
    lambda: accelerated(False, 2),
    "uses or refused: accumul",
    "one backward pass and one step belong to each batch",
    ("accelerate",),
)


@program(tags=("accelerate",))
def accelerate_pictures() -> Case:
    """accelerate with augmented pictures and the loss in the loop."""

    def loop(run: Run) -> None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        case = run.case
        model, optimizer, loader = accelerator.prepare(case.model, case.make_optimizer(), case.make_loader())
        model, optimizer, loader = run.start(model, optimizer, loader)
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(crossentropy(model, batch))
            optimizer.step()

    rows = Flipped(lambda: float(torch.rand(())))
    return Case(convnet(), rows, None, loop=loop, options=MEAN)
