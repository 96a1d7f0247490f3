"""`DPTrainer`: transformers' Trainer, each of whose optimizer steps is one private release."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import fastdp.files as files
from fastdp.calls.modes import in_mode
from fastdp.calls.randomness import unchanged
from fastdp.distributed.ranks import Ranks
from fastdp.engine.loss.boundary import find_loss
from fastdp.entry import make_private
from fastdp.private.criterion import Criterion
from fastdp.private.publish import upload_to_hub
from fastdp.private.run import Private
from fastdp.private.schedules import require_public_schedule
from fastdp.validate import instance

_LOG = logging.getLogger(__name__)
#: The privacy state's file inside a Trainer checkpoint.
STATE_FILE = "fastdp_state.pt"
#: Assumption of a run whose evaluation decides what is kept; its card states it.
_PUBLIC_EVALUATION = (
    "which checkpoint was kept, or when training ended, was decided by figures of the evaluation data: these are public, and "
    "none of them is among the training data"
)
#: Patterns of make_private's messages, and what they become in a Trainer's own terms.
_WORDING = {
    r"make_private \(or PrivacyArguments\)": "PrivacyArguments",
    r"(?<=[Gg]ive )make_private": "PrivacyArguments",
    r"(?<= to )make_private": "PrivacyArguments",
    r"\bresume=True": "resume_from_checkpoint=True",
    r"\buser_ids\b": "user_id_column",
    r"^epochs is": "num_train_epochs is",
    r"^batch_size (?=\d)": "per_device_train_batch_size ",
    r"^(?:No valid checkpoint found in output directory \(|Can't find a valid checkpoint at )(.*?)\)?$": (
        r"\1 holds no checkpoint: leave resume_from_checkpoint out, and give another output_dir if a ledger is there"
    ),
}


@contextmanager
def _trainer_wording() -> Iterator[None]:
    """Make refusals within the block name a Trainer's arguments instead of make_private's."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if error.args and isinstance(error.args[0], str):
            message = error.args[0]
            for theirs, own in _WORDING.items():
                message = re.sub(theirs, own, message)
            error.args = (message, *error.args[1:])
        raise


#: Advice for a run that ends before its budget is spent.
_ENDED_EARLY = (
    "Training ended early: set num_train_epochs or max_steps to what it takes, or go on with resume_from_checkpoint."
)


def _needs_count(loss: Callable[..., Any]) -> bool:
    """Whether a ``compute_loss_func`` must be given the number of a batch's labels: with none it takes a mean of its own."""
    parameter = inspect.signature(loss).parameters.get("num_items_in_batch")
    return parameter is not None and parameter.default is parameter.empty


def _with_count(loss: Callable[..., Any], outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    if num_items_in_batch is None and isinstance(labels, torch.Tensor):
        num_items_in_batch = labels.ne(-100).sum()
    return loss(outputs, labels, num_items_in_batch=num_items_in_batch)


def _log_name(name: str) -> str:
    """The name under which a figure is logged: all of training, time and memory too, are computed from the private data."""
    return f"unprotected_{name}" if name == "loss" or name.startswith("train_") else name


@dataclass(frozen=True)
class PrivacyArguments:
    """Privacy settings of a `DPTrainer`: arguments of `fastdp.make_private`, and ``user_id_column``.

    ``per_device_train_batch_size`` of the training arguments, times the number of processes, is the logical batch size;
    ``user_id_column`` names the data set's column of user ids, for user-level privacy.

    Attributes:
        target_epsilon, target_delta, noise_multiplier, method: the budget, and how it is spent.
        max_physical_batch_size: examples in memory at once.
        user_id_column, max_examples_per_user: whose rows are one unit, and how many of them one step may take.
        criterion: a function of (output, batch) that returns one loss a row, ``[rows]``, for a loss outside the model.
        loss_reduction: "mean" or "sum" over rows, of a ``compute_loss`` or ``compute_loss_func`` of your own; by default "mean"
            where that computes its loss from the model's outputs.
        sampling, adjacency, unit_map, secure_rounding, noise_rounds, two_pass, keep_logits, capture, shapes, allow_large_delta:
            as in `fastdp.make_private`.

    Raises:
        ValueError: when training begins, for what `fastdp.make_private` refuses.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    noise_multiplier: float | None = None
    method: Any = None
    max_physical_batch_size: int | None = None
    sampling: str = "poisson"
    adjacency: str | None = None
    user_id_column: str | None = None
    max_examples_per_user: int | None = None
    unit_map: str | None = None
    secure_rounding: bool = True
    noise_rounds: int = 20
    criterion: Criterion | None = None
    loss_reduction: str | None = None
    two_pass: bool | None = None
    keep_logits: bool | None = None
    capture: Any = "auto"
    shapes: Any = None
    allow_large_delta: bool = False


class LogicalLoader:
    """Yields whole logical batches, each a list of micro-batches, so that one Trainer step is one release."""

    def __init__(self, private: Private):
        self.private = private
        self.dataset: Dataset = private.data_loader.dataset
        self.batch_size = private.data_loader.batch_size
        self._begun = False

    def __len__(self) -> int:
        return len(self.private.data_loader)

    def __iter__(self) -> Iterator[list[Any]]:
        loader = self.private.data_loader
        if self._begun and self.private.steps_done >= self.private.total_steps:
            # A resumed run has fewer steps left than its epochs ask for: it ends at its budget.
            return
        self._begun = True
        # The backward passes of a logical batch come after all of its microbatches, and are checked below.
        loader.look_ahead = True
        batches: list[Any] = []
        for batch in loader:
            batches.append(batch)
            if loader.tickets[-1].is_last:
                yield batches
                loader.require_consumed()
                batches = []


# A mixin: a subclass puts its Trainer behind it, and the type checker is told of the plain one.
_TrainerBase: Any = Trainer if TYPE_CHECKING else object


class PrivateTraining(_TrainerBase):
    """What makes a Trainer of transformers, or a subclass of it, train privately; stands before it among the bases.

    ``per_device_train_batch_size`` times the number of processes counts the units of a logical batch; memory is bounded by
    ``privacy.max_physical_batch_size`` instead of gradient accumulation. Trainer's own gradient clipping is switched off,
    its ``grad_norm`` (computed from the private data, before noise) is never logged, and the training loss is shown as
    ``unprotected_loss``. With ``train_sampling_strategy="group_by_length"`` each logical batch, drawn at random as ever, is
    cut into micro-batches of like lengths. The ledger and the card are written to ``output_dir``.

    Args:
        privacy: budget and method.
        Everything else: as for the Trainer; ``label_smoothing_factor`` smooths the mean over each row's own labels.

    Raises:
        ValueError: for training arguments that cannot be combined with private training, naming each.
    """

    def __init__(self, *args: Any, privacy: PrivacyArguments, **kwargs: Any):
        arguments = kwargs.get("args") or (args[1] if len(args) > 1 else None)
        if arguments is None:
            raise ValueError(
                f"{type(self).__name__} needs args=, the training arguments: the budget depends on batch size and epochs"
            )
        instance(PrivacyArguments, "fastdp.PrivacyArguments(target_epsilon=..., target_delta=...)", privacy=privacy)
        self._check_arguments(arguments, kwargs)
        if kwargs.get("compute_loss_func") is not None and _needs_count(kwargs["compute_loss_func"]):
            kwargs["compute_loss_func"] = partial(_with_count, kwargs["compute_loss_func"])
        super().__init__(*args, **kwargs)
        self.privacy = privacy
        self.private: Private | None = None
        # Clipping is per example. Trainer's own would clip the noisy sum a second time.
        self.args.max_grad_norm = 0.0
        # A resumed run draws new batches, so there are none to skip.
        self.args.ignore_data_skip = True

    #: Settings that have no place in private training, by name: what they are where they do no harm, and what to do instead.
    refused: ClassVar[dict[str, tuple[Any, str]]] = {
        "gradient_accumulation_steps": (
            1,
            "set per_device_train_batch_size to the logical batch and bound memory by privacy.max_physical_batch_size",
        ),
        "fp16": (False, "small gradients vanish in float16; use bf16"),
        "auto_find_batch_size": (
            False,
            "set per_device_train_batch_size, and bound memory by privacy.max_physical_batch_size",
        ),
        "fsdp": ([], "call fully_shard on the model and give it to make_private, in a loop of your own"),
        "deepspeed": (None, "leave it out, as it takes gradients before they are clipped"),
        "push_to_hub": (
            False,
            "it uploads the ledger and the log too; call push_to_hub() on the trainer after training",
        ),
        "neftune_noise_alpha": (None, "leave it out, as its noise depends on how long the batch's rows are padded"),
        "include_num_input_tokens_seen": ("no", "leave it out, as the number of tokens drawn is private"),
    }

    def _check_arguments(self, arguments: TrainingArguments, kwargs: dict[str, Any]) -> None:
        name = type(self).__name__
        for setting, (harmless, hint) in self.refused.items():
            if getattr(arguments, setting, harmless) not in (harmless, None):
                raise ValueError(f"{setting} cannot be used with {name}: {hint}")
        if not 0 <= arguments.label_smoothing_factor <= 1:
            raise ValueError(
                f"label_smoothing_factor is {arguments.label_smoothing_factor}: it must lie between 0 and 1"
            )
        if arguments.max_grad_norm not in (None, 0.0, 1.0):
            warnings.warn(
                "max_grad_norm has no effect: set method=fastdp.DPSGD(max_grad_norm=...) in PrivacyArguments",
                stacklevel=3,
            )
        if getattr(arguments, "predict_with_generate", False) and not isinstance(self, Seq2SeqTrainer):
            raise ValueError(f"predict_with_generate cannot be used with {name}: use DPSeq2SeqTrainer")

    def private_model(self) -> torch.nn.Module:
        """The module whose forward returns the loss of a training batch."""
        return self.model

    def private_collator(self) -> Any:
        """What collates the examples of a training batch."""
        return self.data_collator

    def private_options(self) -> dict[str, Any]:
        """What `make_private` is told besides the user's privacy settings."""
        return {}

    def get_train_dataloader(self) -> Any:
        """The loader of logical batches; makes the run private on first use."""
        if self.private is None:
            self.private = self._make_private()
        return LogicalLoader(self.private)

    def _make_private(self) -> Private:
        self._check_dataset()
        users, loader = self._users(), self._plain_loader()
        batch_size, epochs = int(loader.batch_size or 1), self.args.num_train_epochs
        if self.args.max_steps > 0:
            units = len(set(users)) if users is not None else len(loader.dataset)  # type: ignore[arg-type]
            epochs = self.args.max_steps / -(-units // batch_size)
        # Of processes on several machines only the first may have the ledger's file.
        resuming = Ranks.here().first(lambda: (Path(self.args.output_dir) / "ledger.jsonl").exists())
        self.__dict__.pop("create_optimizer", None)
        lengths, optimizer = self._lengths(), self.create_optimizer()
        # Trainer calls it again. A subclass's own would then make another optimizer, whose steps are not private.
        self.__dict__["create_optimizer"] = lambda *_: self.optimizer
        private = make_private(
            self.private_model(),
            optimizer,
            loader,
            epochs=epochs,
            user_ids=users,
            output_dir=self.args.output_dir,
            resume=resuming and self._resumes,
            **self._options(loader),
        )
        private.ending.advice = _ENDED_EARLY
        if lengths is not None:
            private.data_loader.lengths = lengths
        early = any(isinstance(callback, EarlyStoppingCallback) for callback in self.callback_handler.callbacks)
        if early or self.args.load_best_model_at_end or self.args.save_strategy == "best":
            private.assume(_PUBLIC_EVALUATION)
        return private

    def _check_dataset(self) -> None:
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__} needs a train_dataset")
        if isinstance(self.train_dataset, IterableDataset):
            raise ValueError("an iterable data set cannot be sampled at random; give one with __len__ and __getitem__")
        if len(self.train_dataset) == 0:  # type: ignore[arg-type]
            raise ValueError(
                "train_dataset holds no example: raise max_length if it cut every label, and check the filters"
            )

    def _users(self) -> list[Any] | None:
        """The user of each example, read before Trainer drops the columns that the model's forward does not name."""
        column, known = self.privacy.user_id_column, self.train_dataset[0]
        if column is not None and column not in known:
            raise ValueError(f"user_id_column is {column!r}, which no example has: name one of {', '.join(known)}")
        return None if column is None else [example[column] for example in self.train_dataset]  # type: ignore[attr-defined]

    def _plain_loader(self) -> DataLoader:
        """The loader that `make_private` takes: logical batches of all processes."""
        dataset, collator = self.train_dataset, self.private_collator()
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")  # type: ignore[arg-type]
        else:
            collator = self._get_collator_with_removed_columns(collator, description="training")
        batch_size = self.args.per_device_train_batch_size * self.args.world_size
        if self.args.world_size > 1 and self.is_world_process_zero():
            _LOG.warning(
                "%d processes share each logical batch of %d units (per_device_train_batch_size %d, times processes)",
                self.args.world_size,
                batch_size,
                self.args.per_device_train_batch_size,
            )
        return DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_size=batch_size,
            shuffle=True,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
            drop_last=self.args.dataloader_drop_last,
        )

    def _options(self, loader: DataLoader) -> dict[str, Any]:
        """Arguments of `make_private` beside those that follow from the training arguments."""
        privacy = self.privacy
        options = {name: value for name, value in vars(privacy).items() if name != "user_id_column"}
        options |= self.private_options()
        if privacy.criterion is not None and self.computes_loss:
            _LOG.warning("criterion makes the training loss; compute_loss and compute_loss_func serve evaluation alone")
        given = privacy.criterion is not None or privacy.loss_reduction is not None
        if not given and self._smooths_labels(loader):
            options["criterion"] = self.smoothed_losses
        elif not given and self._loss_is_outside(loader.dataset, loader.collate_fn, options["unit_map"]):
            options["loss_reduction"] = "mean"
        return options

    def _smooths_labels(self, loader: DataLoader) -> bool:
        """Whether ``label_smoothing_factor`` makes the loss: as in Trainer, of labels and where the user computes none."""
        if self.label_smoother is None or self.computes_loss:
            return False
        if self.private_options():
            raise ValueError("label_smoothing_factor cannot be used with packing=True: set packing=False")
        return "labels" in loader.collate_fn([loader.dataset[0]])

    def smoothed_losses(self, output: Any, batch: Any) -> torch.Tensor:
        """Trainer's smoothed cross-entropy of each row ``[rows]``: the mean over the row's own labels, not the batch's."""
        logits, labels = output["logits"] if isinstance(output, Mapping) else output[0], batch["labels"]
        model = getattr(self.model, "get_base_model", lambda: self.model)()
        if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            logits, labels = logits[:, :-1], labels[:, 1:]
        flat, smoothing = labels.flatten(), self.args.label_smoothing_factor
        losses = F.cross_entropy(logits.flatten(0, -2).float(), flat, reduction="none", label_smoothing=smoothing)
        counts = (flat != -100).view(len(labels), -1).sum(1)
        return losses.view(len(labels), -1).sum(1) / counts.clamp(min=1)

    @property
    def computes_loss(self) -> bool:
        """Whether the user computes the loss: by ``compute_loss_func``, or a ``compute_loss`` of a subclass."""
        kinds = type(self).__mro__
        own = [kind for kind in kinds[: kinds.index(PrivateTraining)] if "compute_loss" in vars(kind)]
        return self.compute_loss_func is not None or any(not kind.__module__.startswith("fastdp.") for kind in own)

    def _loss_is_outside(self, dataset: Any, collator: Any, unit_map: str | None) -> bool:
        """Whether the user's loss is made of the model's outputs and not of its own loss; one example is run to tell."""
        if not self.computes_loss:
            return False
        model, outputs = self.private_model(), []
        handle = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            batch = self._prepare_inputs(collator([dataset[0]]))
            batch.pop(unit_map, None)
            with (
                unchanged(model),
                in_mode(model, training=True),
                torch.enable_grad(),
                self.compute_loss_context_manager(),
            ):
                loss = self.private_loss(model, batch)
        finally:
            handle.remove()
        own = find_loss(outputs[-1]) if outputs else None
        if own is None or not loss.requires_grad:
            return True
        return loss is not own and torch.autograd.grad(loss, own, allow_unused=True)[0] is None

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: every trial would spend a budget of its own on the same examples."""
        raise ValueError(
            "hyperparameter_search would spend budget in each trial: tune on public data, then train once."
        )

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own; raises ValueError for a schedule that reads a figure."""
        schedule = super().create_scheduler(*args, **kwargs)
        require_public_schedule(schedule)
        return schedule

    def _lengths(self) -> list[int] | None:
        """Tokens of each example where training groups by length, from the column that holds them or by counting."""
        # Earlier releases of transformers 5 have a flag instead of the strategy.
        strategy = getattr(self.args, "train_sampling_strategy", None)
        if strategy != "group_by_length" and not getattr(self.args, "group_by_length", False):
            return None
        dataset: Any = self.train_dataset
        column = self.args.length_column_name
        if column in getattr(dataset, "column_names", ()):
            return list(dataset[column])
        return [len(example["input_ids"]) for example in dataset]

    _resumes = _ended = False

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train, then write the card; ``resume_from_checkpoint`` also restores the spent budget.

        However it ends, the ledger is closed then, so that the run can be resumed in the same process.
        """
        self._resumes = bool(resume_from_checkpoint)
        if self._ended:
            self.private, self._ended = None, False
        try:
            with _trainer_wording():
                output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        finally:
            if self.private is not None:
                self.private.detach()
                self._ended = True
        assert self.private is not None
        if self.is_world_process_zero():
            self.private.card().save(Path(self.args.output_dir) / "card.json")
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as Trainer does, with card and README beside it; a checkpoint, which is not for others, has none."""
        super().save_model(output_dir, _internal_call=_internal_call)
        if self.private is not None and not _internal_call and self.args.should_save:
            self.private.card().save_beside(output_dir or self.args.output_dir)

    def push_to_hub(self, commit_message: str | None = "End of training", **options: Any) -> Any:
        """Upload model, tokenizer and card; ledger, log and checkpoints, which no guarantee covers, stay where they are.

        Args:
            commit_message: of the upload.
            options: for ``HfApi.upload_folder``.
        """
        name = self.args.hub_model_id or Path(self.args.output_dir).resolve().name
        with tempfile.TemporaryDirectory() as folder:
            self.save_model(folder)
            # The training arguments hold paths of this machine.
            (Path(folder) / "training_args.bin").unlink(missing_ok=True)
            return upload_to_hub(Path(folder), name, commit_message=commit_message, **options)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """One logical batch; the number of tokens in it stays unsaid, since losses are means by example."""
        batch = next(epoch_iterator, None)
        return ([] if batch is None else [batch]), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward over the micro-batches of one logical batch; the optimizer's step releases it."""
        if self.private is None:
            raise RuntimeError(
                "get_train_dataloader of this trainer hands out batches that no accounting describes. Leave it out: pass "
                "train_dataset and data_collator."
            )
        model.train()
        losses = []
        # Probe batches that verify this step come last of the logical batch.
        for micro_batch in itertools.chain(inputs, self.private.data_loader.probe_batches()):
            prepared = self._prepare_inputs(micro_batch)
            with self.compute_loss_context_manager():
                loss = self.private_loss(model, prepared)
            self.accelerator.backward(loss)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def private_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        """The loss of a training batch: the mean over its examples of their own losses."""
        if self.private is None or self.private.criterion is None:
            return self.compute_loss(model, inputs)
        given = inputs
        if self.private.criterion == self.smoothed_losses:
            # As Trainer does, so that the model computes no loss of its own.
            given = {name: value for name, value in inputs.items() if name != "labels"}
        return self.private.loss(model(**given), inputs)

    def floating_point_ops(self, inputs: Any) -> int:
        """None are counted: their number tells how many tokens were drawn, padding included, and would be saved."""
        return 0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """The number of tokens of a private batch is not recorded."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """The norm before the noise is private; it is neither logged nor saved."""

    _judges_training = False

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; figures of the training data themselves are logged as unprotected ones."""
        judged = self.eval_dataset if eval_dataset is None else eval_dataset
        self._judges_training = judged is self.train_dataset
        try:
            return super().evaluate(eval_dataset, *args, **kwargs)
        finally:
            self._judges_training = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log with epsilon, and with what is unprotected marked as such."""
        own = self._judges_training
        marked = {f"unprotected_{k}" if own and k.startswith("eval_") else _log_name(k): v for k, v in logs.items()}
        if self.private is not None and "learning_rate" in logs:
            # Infinite for a method whose printed form has no guarantee.
            marked["epsilon"] = self.private.epsilon()
        super().log(marked, *args, **kwargs)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Write figures as Trainer does, those of training marked as `log` marks them, for their owner alone to read."""
        super().save_metrics(split, {_log_name(key): value for key, value in metrics.items()}, combined)
        self._make_owner_only(f"{split}_results.json", "all_results.json")

    def save_state(self) -> None:
        """Write the state, with the log of losses, as Trainer does, for its owner alone to read."""
        super().save_state()
        self._make_owner_only("trainer_state.json")

    def _make_owner_only(self, *names: str) -> None:
        for path in (Path(self.args.output_dir) / name for name in names):
            if self.is_world_process_zero() and path.exists():
                path.chmod(0o600)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.private is not None and self.args.should_save:
            with files.atomic_path(Path(output_dir) / STATE_FILE) as aside:
                torch.save(self.private.state_dict(), aside)
            # Trainer writes its own files for all to read, the log with losses among them.
            Path(output_dir).chmod(0o700)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.private is not None:
            path = Path(checkpoint) / STATE_FILE
            if not path.exists():
                raise ValueError(f"{checkpoint} has no {STATE_FILE}: it is no checkpoint of a private run")
            # Before the optimizer's state: a method may leave parameters out of the optimizer.
            self.private.load_state_dict(torch.load(path, weights_only=True))
        super()._load_optimizer_and_scheduler(checkpoint)


class DPSeq2SeqTrainer(PrivateTraining, Seq2SeqTrainer):
    """A Seq2SeqTrainer of transformers that trains privately, for ``predict_with_generate``; see `PrivateTraining`.

    Args:
        privacy: `PrivacyArguments`; everything else is as for that trainer. Raises ValueError as `PrivateTraining` does.
    """


class DPTrainer(PrivateTraining, Trainer):
    """A Trainer of transformers that trains privately; see `PrivateTraining`.

    Args:
        privacy: `PrivacyArguments`; everything else is as for that trainer. Raises ValueError as `PrivateTraining` does.
    """
