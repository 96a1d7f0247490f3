"""Trainers of transformers, trl and Lightning, and accelerate."""

from __future__ import annotations

import copy
import functools
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf

import fastdp

from . import kit
from .adapters import lora
from .harness import BATCH, Case, Run, program, register, register_all

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
    model = model or kit.bert()
    given = {"train_dataset": rows or kit.labelled(), "data_collator": kit.classify, **given}
    given |= {} if "model_init" in given else {"model": model}
    names = ("DPTrainer", "Trainer")
    return Case(model, None, loop=lambda run: train(run, names, hf, hf.TrainingArguments, settings or {}, **given))


EVALUATION = {"eval_strategy": "epoch"}
#: Arguments of a Trainer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "weight_decay": {"weight_decay": 0.01, "max_grad_norm": 1.0},
    "max_steps": {"max_steps": 4},
    "bfloat16_checkpointing": {"bf16": True, "gradient_checkpointing": True},
    "drop_last": {"dataloader_drop_last": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}
register_all(ARGUMENTS, trainer, "trainer_")

#: Arguments that a private Trainer cannot take, and the word that its message must contain.
_PLATEAU = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", **EVALUATION}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_acc", "max_physical_batch_size does the same"),
    "tokens_seen": ({"include_num_input_tokens_seen": True}, "tokens_seen", "how many tokens were drawn is private"),
    "plateau": (_PLATEAU, "plateau", "a metric would choose the rate without noise"),
}
for _name, (_settings, _word, _why) in REFUSED.items():
    _build = functools.partial(trainer, _settings, eval_dataset=kit.labelled(8))
    register_all({_name: _build}, lambda build: build(), "trainer_", "", f"refused: {_word}", _why)
_GROUPED = {"train_sampling_strategy": "group_by_length"}
_RANDOM = "the guarantee needs random batches"
register("trainer_group_by_length", lambda: trainer(_GROUPED), "uses or refused: length", _RANDOM)


@program()
def trainer_evaluation() -> Case:
    """Evaluation each epoch with compute_metrics, the best model loaded at the end."""
    metrics = lambda p: {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}  # noqa: E731
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    settings = {"num_train_epochs": 2, **EVALUATION, **best}
    return trainer(settings, eval_dataset=kit.labelled(8, seed=1), compute_metrics=metrics)


@program()
def trainer_stops_itself() -> Case:
    """A callback stops training after two steps; the rest of the budget is kept, and said."""

    class Stop(hf.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 2

    return trainer(callbacks=[Stop()])


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


def _criterion() -> Case:
    def loop(run: Run) -> None:
        options = {"privacy": {"criterion": weighted}} if run.is_private else {}
        module = type("Module", (), {"Trainer": Weighing})
        rows = {"model": run.case.model, "train_dataset": kit.labelled(), "data_collator": kit.classify}
        train(run, ("DPTrainer", "Trainer"), module, hf.TrainingArguments, {}, **rows, **options)

    return Case(kit.bert(), None, loop=loop)


def _labels_kept(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """The model is given the labels, and its own loss is not used."""
    output = model(**inputs)
    loss = weighted(output, inputs).mean()
    return (loss, output) if return_outputs else loss


def _halved(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """Half of the model's own loss."""
    output = model(**inputs)
    return (0.5 * output.loss, output) if return_outputs else 0.5 * output.loss


def _mean_by_weights(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    """CrossEntropyLoss(weight=...), whose mean is over the weights of the batch."""
    labels = inputs.pop("labels")
    output = model(**inputs)
    loss = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]))(output.logits, labels)
    return (loss, output) if return_outputs else loss


def _with_compute_loss(function: Any, name: str = "compute_loss") -> Case:
    """A subclass with a compute_loss of its own, or another method."""

    def loop(run: Run) -> None:
        base = fastdp.DPTrainer if run.is_private else hf.Trainer
        module = type("Module", (), {"Trainer": type("Own", (base,), {name: function})})
        fastdp.OwnTrainer = module.Trainer
        try:
            rows = {"model": run.case.model, "train_dataset": kit.labelled(), "data_collator": kit.classify}
            train(run, ("OwnTrainer", "Trainer"), module, hf.TrainingArguments, {}, **rows)
        finally:
            delattr(fastdp, "OwnTrainer")

    return Case(kit.bert(), None, loop=loop)


def _own_loader(self: Any) -> Any:
    """A loader of the subclass's own."""
    sizes = {"batch_size": self.args.per_device_train_batch_size, "shuffle": True}
    return torch.utils.data.DataLoader(self.train_dataset, collate_fn=self.data_collator, **sizes)


COMPUTED = {"": Weighing.compute_loss, "_labels_kept": _labels_kept, "_halved": _halved}
register_all(COMPUTED, _with_compute_loss, "trainer_compute_loss")
_DIVIDES = "torch's mean divides by the weights of the whole batch"
register(
    "trainer_compute_loss_mean", lambda: _with_compute_loss(_mean_by_weights), "refused: PrivacyArguments", _DIVIDES
)


def _own_optimizer(self: Any, model: Any = None) -> Any:
    """A new optimizer at each call, a rate for each layer."""
    rates = [{"params": [p], "lr": 1e-3 * 0.9**depth} for depth, p in enumerate(self.model.parameters())]
    self.optimizer = torch.optim.AdamW(rates)
    return self.optimizer


register("trainer_own_optimizer", lambda: _with_compute_loss(_own_optimizer, "create_optimizer"))
register(
    "trainer_own_loader",
    lambda: _with_compute_loss(_own_loader, "get_train_dataloader"),
    "refused: data_collator",
    "the accounting describes the sampler of the private loader alone",
)


@program()
def trainer_compute_loss_func() -> Case:
    return trainer(compute_loss_func=lambda output, labels, **_: weighted(output, {"labels": labels}).mean())


@program()
def trainer_seq2seq_generation() -> Case:
    settings = {"predict_with_generate": True, "generation_max_length": 6, **EVALUATION}
    given = {"train_dataset": kit.pair_rows(), "eval_dataset": kit.pair_rows(4), "data_collator": kit.translate}
    given["processing_class"] = kit.tokenizer()
    names = ("DPSeq2SeqTrainer", "Seq2SeqTrainer")
    return Case(
        kit.t5(),
        None,
        loop=lambda run: train(run, names, hf, hf.Seq2SeqTrainingArguments, settings, model=run.case.model, **given),
    )


def with_trl(kind: str, columns: dict[str, list[Any]], settings: dict[str, Any] | None = None, **given: Any) -> Case:
    """SFTTrainer or DPOTrainer of trl."""

    def loop(run: Run) -> None:
        import trl
        from datasets import Dataset

        own = {"max_length": 32, "bf16": False, "gradient_checkpointing": False, **(settings or {})}
        data = {"model": run.case.model, "train_dataset": Dataset.from_dict(columns), "processing_class": words()}
        names = (f"DP{kind}Trainer", f"{kind}Trainer")
        train(run, names, trl, getattr(trl, f"{kind}Config"), own, **data, **given)

    return Case(kit.llama(), None, loop=loop)


def words() -> Any:
    """A tokenizer of whole words, with a chat template."""
    found = copy.deepcopy(kit.tokenizer(pair=False))
    found.chat_template = (
        "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + ' [SEP] ' }}{% endgeneration %}"
        "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}"
    )
    return found


def _pairs() -> dict[str, list[Any]]:
    return {"prompt": kit.texts(high=6), "completion": [" " + text for text in kit.texts(high=6, seed=1)]}


def _preferences() -> dict[str, list[Any]]:
    return {name: kit.texts(high=5, seed=n) for n, name in enumerate(("prompt", "chosen", "rejected"))}


def _messages() -> dict[str, list[Any]]:
    roles = ("user", "assistant")
    talks = zip(kit.texts(high=6), kit.texts(high=6, seed=1))
    return {"messages": [[{"role": r, "content": c} for r, c in zip(roles, talk)] for talk in talks]}


#: Data and settings of supervised fine-tuning.
SFT: dict[str, tuple[Callable[[], dict[str, list[Any]]], dict[str, Any]]] = {
    "completions": (_pairs, {"completion_only_loss": True}),
    "messages_assistant_only": (_messages, {"assistant_only_loss": True}),
    "packed": (lambda: {"text": kit.texts()}, {"packing": True, "max_length": 16}),
}
register_all(SFT, lambda v: with_trl("SFT", v[0](), v[1]), "sft_")


def lightning(wrapped: bool, manual: bool = False, outside: bool = False) -> Case:
    """Lightning's Trainer around a model of transformers, which returns its loss or leaves that to training_step."""

    def loop(run: Run) -> None:
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model, self.automatic_optimization = kit.bert(), not manual

            def forward(self, **batch: Any) -> Any:
                return self.model(**batch)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                found = self(**{k: v for k, v in batch.items() if not outside or k != "labels"})
                loss = F.cross_entropy(found.logits, batch["labels"]) if outside else found.loss
                self.log("train_loss", loss.detach())
                if manual:
                    optimizer = self.optimizers()
                    self.manual_backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return self.optimizer

        module = Module()
        module.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        _, _, loader = run.start(module, module.optimizer)
        if run.is_private and wrapped:
            from fastdp.integrations.lightning import Batches

            loader = Batches(run.private)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        fit = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
        fit.fit(module, loader)

    return Case(kit.bert(), kit.labelled(), kit.classify, loop=loop, options=kit.MEAN if outside else {})


@program("uses or refused: Batches", "Lightning takes a loader's length for a number of batches")
def lightning_loader() -> Case:
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

    return Case(kit.bert(), kit.labelled(), kit.classify, loop=loop)


register("accelerate_prepared_before", lambda: accelerated(False))
register("accelerate_prepared_after", lambda: accelerated(True))
register(
    "accelerate_accumulation",
    lambda: accelerated(False, 2),
    "uses or refused: accumul",
    "one backward pass and one step belong to each batch",
)


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "trainer_model_init": lambda: trainer(model_init=lambda: kit.bert()),
    "trainer_criterion": lambda: _criterion(),
    "trainer_label_smoothing_of_tokens": lambda: trainer(
        {"label_smoothing_factor": 0.1}, kit.gpt2(), kit.id_rows(), data_collator=kit.causal
    ),
    "sft_lora": lambda: with_trl("SFT", {"text": kit.texts()}, peft_config=lora()),
    "dpo_lora": lambda: with_trl("DPO", _preferences(), peft_config=lora()),
    "lightning_manual": lambda: lightning(True, manual=True),
    "lightning_outside": lambda: lightning(True, outside=True),
}
register_all(ONE_LINE, lambda build: build())
