"""A fine-tuning run from start to end: everything that can be refused is refused before any budget is spent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Subset

import fastdp
import fastdp.files as files
from fastdp.accounting import Ledger, LedgerError
from fastdp.accounting.witness import check_release, count_release, data_digest, knows_ledger, same_data
from fastdp.data import Collator, Examples
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.curves import Curves
from fastdp.finetune.evaluation import Quality, autocast, evaluate
from fastdp.finetune.folder import (
    CHECKPOINT,
    CONFIG,
    DATA,
    LEDGER,
    METRICS,
    PERTURBATION,
    RESULT,
    SAMPLES,
    Result,
    check_output,
    keep_metrics,
    read_checkpoint,
)
from fastdp.finetune.memory import PeakMemory, rehearse_step
from fastdp.finetune.methods import LOCAL, Public, check_method, choose_method
from fastdp.finetune.models import (
    check_model_name,
    kept_names,
    load_tokenizer,
    load_trained,
    restore_trained,
    save_weights,
    trained_state,
)
from fastdp.finetune.perturbations import Subject, choose_perturbation
from fastdp.finetune.reporter import Forecast, Reporter
from fastdp.finetune.samples import draw_samples
from fastdp.finetune.tasks import check_tokens, cut_note, encode_rows, messages_column, record_texts
from fastdp.finetune.usage import add_usage, tokenizer_to_save
from fastdp.methods.perturbation import Releases
from fastdp.public import PublicGate
from fastdp.tables import DataError, Rows, read_rows
from fastdp.validate import usable_device

EPSILON_POINTS = 20


def finetune(
    config: FinetuneConfig,
    resume: bool = False,
    reporter: Reporter | None = None,
    noise_multiplier: float | None = None,
) -> Result:
    """Fine-tune as `config` says and write weights, card and metrics to its output folder.

    With `resume`, a run that was interrupted goes on from its last checkpoint; what it had spent stays spent, so it may
    end after fewer updates than planned. ``noise_multiplier`` is for whoever pays for several runs together: it takes the place
    of what the run's own epsilon would ask for.

    Raises:
        ConfigError: for settings that do not hold, do not fit the model or differ from those of the resumed run.
        DataError: for data files that cannot be used.
    """
    config.check()
    if resume and config.method in LOCAL:
        raise ConfigError(
            f"a run of {config.method} cannot be resumed; a new run in another output releases every record a "
            "second time, at the full price again."
        )
    check_output(Path(str(config.output)), config, resume)
    run = FinetuneRun(config, reporter or Reporter(), noise_multiplier)
    try:
        # Before the ledger is opened: a run that cannot go on stays as it is.
        checkpoint = run.last_checkpoint() if resume else None
        run.make_private(resume)
        if run.releases.once_an_epoch:
            check_release(run.texts)
        return run.execute(checkpoint)
    except BaseException:
        if not resume:
            run.forget_if_nothing_was_spent()
        raise
    finally:
        run.close()


def _check_size(config: FinetuneConfig, examples: int, users: list[str] | None, table: Rows) -> None:
    """Refuse a batch, or a delta, that does not fit the number of units."""
    units, name = (examples, "examples") if users is None else (len(set(users)), "people")
    if users is not None and "" in users:
        raise DataError(f"{table.place(users.index(''))}: column {config.user_column!r} (user_column) names nobody")
    if config.batch_size > units:
        raise ConfigError(f"batch_size {config.batch_size} exceeds the {units} training {name}; lower it")
    promised = config.epsilon is not None and math.isfinite(config.epsilon)
    if promised and config.delta >= 1 / units and not config.large_delta:
        raise ConfigError(
            f"delta {config.delta:g} is not below 1 / {units} {name}, so it alone would allow publishing a whole record: "
            "lower it, or confirm with large_delta"
        )


def _device(config: FinetuneConfig) -> torch.device:
    try:
        device = usable_device(config.device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.capture and device.type != "cuda":
        raise ConfigError(
            f"capture records CUDA graphs, and this run is on {device}: leave capture out, or choose a GPU"
        )
    return device


class FinetuneRun:
    """A run with its data read, its model loaded and a step rehearsed, of which nothing was released yet.

    Args:
        config: checked settings, whose output may hold a run.
        reporter: told how it goes.
        noise_multiplier: as in `finetune`.

    Attributes:
        texts: all text of each record.
        users: whose each example is, if people are protected.
        chat: whether the examples are conversations.
        measured: seconds of a step and peak bytes, by the rehearsal.
        made: whether the output folder was not there before.
        notes: what the user was told.
        earlier: releases of the same texts by earlier runs, in words.

    Raises:
        ConfigError, DataError: as `finetune`.
    """

    def __init__(self, config: FinetuneConfig, reporter: Reporter, noise_multiplier: float | None) -> None:
        self.config, self.reporter, self.output = config, reporter, Path(str(config.output))
        self.notes: list[str] = []
        self.device = _device(config)
        check_method(config)
        opening = choose_perturbation(config)
        ends = check_model_name(config)
        self.tokenizer = load_tokenizer(config)
        reporter.phase("reading data")
        table = read_rows(str(config.train), config.encoding)
        train = self._encode(table, ends)
        held_out = self._encode(read_rows(config.eval, config.encoding), ends) if config.eval else None
        self.users = table.column(config.user_column, "user_column") if config.user_column else None
        _check_size(config, len(train), self.users, table)
        reporter.phase("loading the model")
        self.model: Any = load_trained(config, self.tokenizer).to(self.device)
        for examples in filter(None, (train, held_out)):
            check_tokens(examples, self.model, config)
        reporter.phase("rehearsing a step")
        self.measured = rehearse_step(self.model, train, self._collator(None), config)
        self.texts, self.chat = record_texts(table, config), messages_column(table, config) is not None
        self.gate = PublicGate(self.texts, [str(config.train)], config.public_overlap)
        self.curves = Curves(config, len(train)) if config.private_metrics is not None else None
        self.noise_multiplier = noise_multiplier if self.curves is None else self.curves.step_multiplier
        self.examples, self.updates, self.made = train.items, 0, False
        self.before: Quality | None = None
        self.private: Any = None
        self.earlier: list[str] = []
        self.releases: Releases = opening(Subject(config, self.model, self.tokenizer, train, self._read_public))
        self.train = self._seen(train, training=True)
        self.held_out = None if held_out is None else self._seen(held_out, training=False)
        self.collator = self._collator(self.releases.padded_length)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.reporter.note(text)

    def _encode(self, table: Rows, ends: int | None = None) -> Examples:
        examples = encode_rows(table, self.tokenizer, self.config, ends)
        if note := cut_note(examples, table, self.config):
            self._note(note)
        return examples

    def _seen(self, examples: Examples, *, training: bool) -> Examples:
        """Examples as the method lets the model see them."""
        return Examples(self.releases.examples(examples.items, training=training), examples.truncated)

    def _collator(self, length: int | None) -> Collator:
        assert isinstance(self.tokenizer.pad_token_id, int)
        return Collator(self.tokenizer.pad_token_id, length)

    def _data(self) -> str:
        """Tells these examples from others, and nothing more (see `fastdp.accounting.witness.data_digest`)."""
        return data_digest([json.dumps([self.examples, self.users])])

    def last_checkpoint(self) -> dict[str, Any] | None:
        """Where an interrupted run goes on, with all that may have been released since then counted.

        Raises:
            ConfigError: for a damaged checkpoint, and for other examples than those that the run began with.
        """
        try:
            known = Ledger.read(self.output / LEDGER)
        except (LedgerError, OSError, ValueError):
            # Opening it says what is wrong with it.
            return read_checkpoint(self.output)
        if (noted := known.noted(DATA)) is not None:
            self._check_data(noted)
        checkpoint = read_checkpoint(self.output)
        if checkpoint is None:
            self._note("the run was interrupted before its first checkpoint: it starts anew, its spending kept")
        if not knows_ledger(known.run_id):
            self._count_unproven(known, checkpoint)
        return checkpoint

    def _check_data(self, noted: str) -> None:
        same = same_data(noted, self._data())
        if same is False:
            raise ConfigError(
                f"{self.config.train} holds other examples than the run began with: put them back, or begin anew in another "
                "output, which releases both"
            )
        if same is None:
            self._note("whether the training data are those that the run began with is not known to this account")

    def make_private(self, resume: bool) -> None:
        """Hand model, optimizer and loader to the engine, which opens the ledger in the output folder."""
        config = self.config
        self.made = not self.output.exists()
        files.make_folder(self.output)
        if not resume:
            config.save(self.output / CONFIG)
        self.names = kept_names(self.model)
        method = choose_method(config, self._read_public)
        target = math.inf if isinstance(method, fastdp.NonPrivate) else config.epsilon
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer
        if config.is_zeroth_order:
            # Momentum would apply the slope of one direction to the next.
            optimizer = torch.optim.SGD(parameters, lr=config.learning_rate)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        loader = DataLoader(self.train, batch_size=config.batch_size, shuffle=True, collate_fn=self.collator)
        self.private = fastdp.make_private(
            self.model,
            optimizer,
            loader,
            method=method,
            target_epsilon=None if self.noise_multiplier is not None else target,
            noise_multiplier=self.noise_multiplier,
            target_delta=config.delta,
            epochs=config.epochs,
            user_ids=self.users,
            max_examples_per_user=config.max_examples_per_user,
            max_physical_batch_size=config.physical_batch_size,
            sampling="shuffled" if self.releases.once_an_epoch else config.sampling,
            output_dir=str(self.output),
            resume=resume,
            capture="auto" if config.capture is None else config.capture,
            shapes=None if config.shapes == "own" else self._public_lengths(),
            noise_rounds=config.noise_rounds,
            # `_check_size` has asked, in the words of this program's settings.
            allow_large_delta=True,
        )
        self.private.longest = config.max_length * (config.max_examples_per_user or 1)
        # Whoever stops it is told how to go on.
        self.private.ending.expect()
        if not resume:
            self.private.ledger.note(DATA, self._data())
        if self.curves is not None:
            self.curves.declare(self.private.ledger)
        self.releases.follow(self.private)
        self.model, self.optimizer, self.loader = self.private
        # The engine's optimizer holds the model's parameters alone; these stand beside it and see released codes only.
        self.beside = self.releases.trained_parameters()
        self.decoder = torch.optim.AdamW(self.beside, lr=config.learning_rate) if self.beside else None
        self.scheduler = LambdaLR(self.optimizer, _schedule(config, self.private.total_steps))

    def _public_lengths(self) -> list[int]:
        """Powers of two, and one token more than the longest row: see `fastdp.make_private`."""
        longest = self.config.max_length + 1
        if (places := getattr(self.model.config, "max_position_embeddings", None)) and longest > places:
            raise ConfigError(
                f"shapes: public pads rows to {longest} tokens, and the model takes {places}: lower max_length to {places - 1}"
            )
        return [2**power for power in range(4, 20) if 2**power < longest] + [longest]

    def _read_public(self, path: str, count: int, length: int | None = None) -> Public:
        if not Path(path).exists():
            raise ConfigError(f"there is no public text {path}: name one file or folder")
        table = read_rows(path, self.config.encoding)
        origin = self.gate.admit(path, record_texts(table, self.config), table.lines)
        examples = self._encode(table)
        chosen = Subset(examples, range(min(count, len(examples))))
        loader = DataLoader(chosen, batch_size=self.config.physical_batch_size, collate_fn=self._collator(length))
        return Public([{key: value.to(self.device) for key, value in batch.items()} for batch in loader], origin)

    def close(self) -> None:
        """Give the model back as it was."""
        if self.private is not None:
            self.private.detach()
        self.releases.discard()

    def forget_if_nothing_was_spent(self) -> None:
        """After a failure before the first release, leave no run behind that would have to be resumed."""
        if self.releases.untouched and (self.private is None or self.private.ledger.untouched):
            for name in (CONFIG, LEDGER, METRICS):
                (self.output / name).unlink(missing_ok=True)
            if self.made and not any(self.output.iterdir()):
                self.output.rmdir()

    def execute(self, checkpoint: dict[str, Any] | None) -> Result:
        """Evaluate, train, evaluate, write."""
        if checkpoint:
            self._restore(checkpoint)
        else:
            self.before = self._evaluate("evaluating before training")
        if self.updates == 0 and self.private.steps_done >= self.private.total_steps:
            raise ConfigError(
                f"The run in {self.output} spent its budget before its first checkpoint. Start a new run with "
                "a smaller checkpoint_every; it releases the data again."
            )
        if self.releases.once_an_epoch:
            # Not before: a run that is stopped until here has released nothing.
            self.earlier = count_release(self.texts, self.config.method, self.output)
        keep_metrics(self.output, self.updates)
        self.model.train()
        self.reporter.phase("training")
        peak = PeakMemory(self.device)
        seconds = self._train(peak)
        if count := self.private.nonfinite_examples:
            self._note(f"{count} times an example's gradient was not finite; it was left out of its step")
        self._save_checkpoint()
        after = self._evaluate("evaluating after training")
        return self._write(seconds, peak.so_far(), after)

    def _left(self, seconds: list[float], peak: int) -> Forecast:
        """What is left to do, by the steps done; the first one is slower, since the engine looks at the model then."""
        steps = self.private.total_steps - self.private.steps_done
        usual = seconds[1:] or seconds
        each = sum(usual) / len(usual) if usual else self.measured[0]
        # The guarantee of some local methods is no epsilon; without any, it is infinite.
        epsilon = math.inf if self.releases.flaws() else self.config.epsilon
        return Forecast(steps, each * steps, max(peak, self.measured[1]), epsilon, self.config.delta)

    def _train(self, peak: PeakMemory) -> list[float]:
        config, private = self.config, self.private
        seconds: list[float] = []
        losses: list[float] = []
        every = max(1, private.total_steps // EPSILON_POINTS)
        self.reporter.forecast(self._left([], 0))
        begin = time.perf_counter()
        with files.appending(self.output / METRICS) as metrics:
            while private.steps_done < private.total_steps:
                self.releases.set_epoch(private.steps_done // private.steps_per_epoch + 1)
                for batch in self.loader:
                    batch = {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
                    with autocast(self.device, config.precision):
                        loss = self.model(**batch).loss
                    loss.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                    if not private.last_step_done:
                        continue
                    self._step_beside()
                    seconds.append(time.perf_counter() - begin)
                    self.updates += 1
                    self.scheduler.step()
                    known = self.updates % every == 0 or private.steps_done >= private.total_steps
                    epsilon = self._epsilon() if known else None
                    mean = sum(losses) / len(losses)
                    metrics.write(json.dumps(self._metrics_row(seconds[-1], epsilon, mean, self._released())) + "\n")
                    metrics.flush()
                    self.reporter.step(
                        private.steps_done, private.total_steps, mean, epsilon, self._left(seconds, peak.so_far())
                    )
                    losses.clear()
                    if self.updates % config.checkpoint_every == 0:
                        self._save_checkpoint()
                    begin = time.perf_counter()
        return seconds

    def _step_beside(self) -> None:
        """Train what the method trains beside the model, whose gradients are sums over about ``batch_size`` examples."""
        if self.decoder is None:
            return
        for parameter in self.beside:
            if parameter.grad is not None:
                parameter.grad /= self.config.batch_size
        self.decoder.step()
        self.decoder.zero_grad()

    def _epsilon(self) -> float:
        """Spent so far; no figure of a run without a guarantee may look like one."""
        return math.inf if self.releases.flaws() else self.releases.epsilon()

    def _released(self) -> dict[str, float] | None:
        """A point of the curves that may be shown, where one is due."""
        if self.curves is None or not self.curves.due(self.private.steps_done):
            return None
        return self.curves.point(self.private.ledger, self.model, self.held_out, self.collator)

    def _metrics_row(
        self, seconds: float, epsilon: float | None, loss: float, released: dict[str, float] | None
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"step": self.updates, "learning_rate": self.scheduler.get_last_lr()[0]}
        if epsilon is not None:
            row["epsilon"] = epsilon if math.isfinite(epsilon) else "inf"
        if released is not None:
            row["released"] = released
        # A reader must not take these for released figures: they are functions of the drawn examples without noise.
        return row | {"unprotected": {"loss": loss, "seconds": seconds}}

    def _evaluate(self, phase: str) -> Quality | None:
        if self.held_out is None:
            return None
        self.reporter.phase(phase)
        config = self.config
        return evaluate(self.model, self.held_out, self.collator, config.eval_batch_size, config.task, config.precision)

    def _write(self, seconds: list[float], peak: int, after: Quality | None) -> Result:
        self.reporter.phase("writing")
        card = self.releases.card().after(self.earlier)
        folder = save_weights(self.model, tokenizer_to_save(self.tokenizer, self.config, chat=self.chat), self.output)
        card = card.of_files(folder)
        card.save(self.output / self.releases.card_name)
        add_usage(card.save_beside(folder), self.config, chat=self.chat)
        if state := self.releases.state_dict():
            with files.atomic_path(self.output / PERTURBATION) as aside:
                torch.save(state, aside)
        self._write_samples()
        installed = self.private.installed
        moved = self.model.parameters() if installed is None else installed.trained.values()
        result = Result(
            output=str(self.output),
            epsilon=self._epsilon(),
            delta=self.config.delta,
            noise_multiplier=self.releases.noise_multiplier,
            steps=self.updates,
            trained_parameters=sum(p.numel() for p in moved if p.requires_grad or installed is not None),
            seconds_per_step=sum(seconds) / len(seconds) if seconds else math.nan,
            peak_bytes=peak,
            before=self.before,
            after=after,
            privacy=self.releases.in_words(),
            notes=tuple(self.notes),
        )
        result.save(self.output / RESULT)
        (self.output / CHECKPOINT).unlink(missing_ok=True)
        return result

    def _write_samples(self) -> None:
        config = self.config
        # Under a local method the model meets perturbed text alone.
        if not config.samples or config.method in LOCAL:
            return
        try:
            found = draw_samples(self.model, self.tokenizer, self.collator, self.held_out, config)
        except (ValueError, TypeError, RuntimeError) as error:
            # The run has paid for its weights: that the model writes no text is no reason to lose them.
            self._note(f"no samples were drawn from the model: {str(error).splitlines()[0]}")
            return
        files.write_json(self.output / SAMPLES, found)

    def _save_checkpoint(self) -> None:
        state = {
            "updates": self.updates,
            "trained": trained_state(self.model, self.names),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "private": self.private.state_dict(),
            "before": self.before and self.before.as_dict(),
        }
        # Through Python's own file: torch's writer says of a full disk only that it failed.
        with files.atomic_path(self.output / CHECKPOINT) as aside, open(aside, "wb") as file:
            torch.save(state, file)

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        restore_trained(self.model, checkpoint["trained"], self.names)
        # First, since a method may have left some parameters out of the optimizer whose state comes next.
        self.private.load_state_dict(checkpoint["private"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        self.updates = checkpoint["updates"]
        self.before = Quality(**checkpoint["before"]) if checkpoint["before"] else None

    def _count_unproven(self, known: Ledger, checkpoint: dict[str, Any] | None) -> None:
        """Count what may have been released since the last checkpoint, of a ledger that nothing shows to be whole."""
        begun = checkpoint["private"]["steps_done"] if checkpoint else 0
        most = min(known.budget_steps, begun + self.config.checkpoint_every)
        if most > known.spent_steps:
            with Ledger.open(self.output / LEDGER) as ledger:
                ledger.restore(most)
        self._note(
            "this account's memory of the run is lost, so its ledger may have been cut back: "
            f"{max(most, known.spent_steps)} steps count as spent, where the ledger holds {known.spent_steps}"
        )


def _schedule(config: FinetuneConfig, total: int) -> Callable[[int], float]:
    warm = config.warmup * total

    def factor(step: int) -> float:
        rise = min(1.0, (step + 1) / warm) if warm else 1.0
        share = min(1.0, step / total)
        fall = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 * (1 + math.cos(math.pi * share))}
        return rise * fall[config.schedule]

    return factor
