"""Choosing settings on private data, and paying for it: random stopping, judged by noised scores, as one event.

A secret number of trials is drawn (truncated negative binomial, Papernot and Steinke 2022, arXiv:2110.03620). Each trains with
settings drawn from the candidates and is judged on examples kept aside, by a sum of bounded losses with noise. The best alone
leaves: its weights, its settings and its noised score. What that costs is Theorem 2 of the paper (`fastdp.accounting.renyi`), for
an example that is trained on or judges; the ledger notes it before the first trial.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors.torch import load_file

import fastdp.accounting as accounting
import fastdp.accounting.renyi as renyi
import fastdp.files as files
from fastdp.accounting.statements import SEARCH_TIME
from fastdp.audit.saved import load_saved
from fastdp.data import Collator
from fastdp.finetune.config import TYPES, ConfigError, FinetuneConfig, load_config
from fastdp.finetune.folder import CONFIG, LEDGER
from fastdp.finetune.judges import JUDGED, LARGEST_LOSS, noised_means, scores
from fastdp.finetune.models import ADAPTER_FOLDER, MODEL_FOLDER, load_tokenizer
from fastdp.finetune.run import finetune
from fastdp.finetune.tasks import cut_note, encode_rows, messages_column
from fastdp.finetune.usage import add_usage
from fastdp.ops import NoiseStream
from fastdp.settings import TYPE_WORDS
from fastdp.tables import Rows, read_rows

#: Settings that may be searched: what a trial costs does not depend on them.
FREE = tuple("learning_rate max_grad_norm lora_r lora_alpha schedule warmup weight_decay bottleneck_size".split())
#: Factors of the learning rate that are tried where nothing is named.
USUAL = (0.25, 0.5, 1.0, 2.0, 4.0)
TRIALS = ".trials"
#: Fewer judges than this choose by noise alone.
LEAST_JUDGES = 20

T = TypeVar("T")


@dataclass(frozen=True)
class TuneResult:
    """What a search came to.

    Attributes:
        settings: of the best trial, by name, those that were searched.
        score: noised mean of bounded losses of the examples kept aside, in nats; lower is better.
        epsilon, delta: what the whole search costs.
        noise_multiplier: of a trial's step.
    """

    output: str
    settings: dict[str, Any]
    score: float
    epsilon: float
    delta: float
    noise_multiplier: float


def best_of(
    trial: Callable[[int], tuple[float, T]], shape: float, stop: float, uniform: float | None = None
) -> tuple[float, T]:
    """The lowest score, with what it came with, of a secret number of trials.

    Args:
        trial: takes the trial's number; every call must be an independent run of one and the same mechanism.
        shape, stop: of the number of trials, see `fastdp.accounting.chosen`.
        uniform: what the number is drawn from; the operating system's randomness by default.
    """
    drawn = secrets.SystemRandom().random() if uniform is None else uniform
    best: tuple[float, T] | None = None
    for number in range(renyi.draw_trials(shape, stop, drawn)):
        found = trial(number)
        if best is None or found[0] < best[0]:
            best = found
    assert best is not None
    return best


def tune(
    config: FinetuneConfig,
    candidates: Mapping[str, Sequence[Any]] | None = None,
    trials: float = 6.0,
    shape: float = 0.0,
    held_out: float = 0.1,
    resume: bool = False,
) -> TuneResult:
    """Train with the settings that suit the data best, within one budget, and write weights and card to the output folder.

    Args:
        config: as for `finetune`, with ``epsilon`` and ``delta`` for the whole search; ``method`` is dpsgd.
        candidates: values of settings among `FREE`; any combination may be drawn. By default, learning rates around config's.
        trials: how many are expected. The number itself stays secret, and may be several times larger.
        shape: of its distribution: 0 (logarithmic) costs least, 1 (geometric) varies less.
        held_out: share of the examples that judge and are not trained on, each chosen by a coin.
        resume: go on with a search that was interrupted. Its number of trials, its judges and the scores it had stay; the trial
            that was cut short begins anew, so that all remain independent runs of one mechanism, and nothing more is paid.

    Trials say nothing while they run, since their number is secret.

    Raises:
        ConfigError: for settings that cannot be searched or do not hold, before anything is spent.
        DataError: for data files that cannot be used.
    """
    config.check()
    searched = (
        {"learning_rate": [config.learning_rate * factor for factor in USUAL]} if candidates is None else candidates
    )
    options = _combinations(config, searched)
    _check(config, trials, shape, held_out)
    output = Path(str(config.output))
    work = output / TRIALS
    table = read_rows(str(config.train), config.encoding)
    asked = [dataclasses.asdict(config) | {"output": None}, searched, trials, shape, held_out, len(table)]
    state = _State.read(work, asked) if resume else _State.begin(work, asked, table, held_out)
    train = table.take([index for index, judging in enumerate(state.judging) if not judging])
    judges = table.take([index for index, judging in enumerate(state.judging) if judging])
    _check_rows(table, len(train), len(judges), config)
    stop = renyi.stop_for(trials, shape)
    cost = _cost(config, len(train), shape, stop)
    assert config.epsilon is not None
    sigma = accounting.calibrate(lambda z: cost(z)[0], config.epsilon, config.delta)
    event, judging = cost(sigma)
    header = {"mechanism": _NAME, "unit": "example", "adjacency": "add_remove", "dataset_size": len(table)}
    ledger = accounting.Ledger.open_or_create(
        output / LEDGER, header, event=accounting.EventModel(event), budget_steps=1, resume=resume
    )
    try:
        files.write_rows(work / "train.jsonl", train.rows)
        state.save()
        stream = NoiseStream()
        if not ledger.spent_steps:
            ledger.record()

        def trial(number: int) -> tuple[float, Path]:
            if number == len(state.done):
                folder = work / f"{number}-{secrets.token_hex(4)}"
                own: dict[str, Any] = {"train": str(work / "train.jsonl"), "encoding": "utf-8", "output": str(folder)}
                drawn = dataclasses.replace(config, **secrets.choice(options), **own, eval=None, samples=0)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    finetune(drawn, noise_multiplier=sigma)
                state.done.append((_judge(folder, judges, judging, stream), folder.name))
                state.save()
            score, name = state.done[number]
            return score, work / name

        score, best = best_of(trial, shape, stop, state.uniform)
        search = {
            "candidates": {name: list(values) for name, values in searched.items()},
            "expected_trials": trials,
            "shape": shape,
            "stop": stop,
            "noise_multiplier_of_a_step": sigma,
            "noise_multiplier_of_a_score": judging,
        }
        chat = messages_column(table, config) is not None
        found = _publish(config, best, score, event, ledger, search, chat=chat)
        shutil.rmtree(work, ignore_errors=True)
        return found
    finally:
        ledger.close()


def _check_rows(table: Rows, train: int, judges: int, config: FinetuneConfig) -> None:
    """Raise ConfigError for too few examples; tell of those that are cut before anything is paid, as trials are silent."""
    if judges < LEAST_JUDGES or train < config.batch_size:
        raise ConfigError(
            f"Of {len(table)} examples {judges} would judge and {train} would train, too few to choose by. Give more data, or "
            "change held_out or batch_size."
        )
    if config.delta >= 1 / len(table):
        raise ConfigError(f"delta {config.delta:g} is not below 1 / {len(table)} examples: lower it")
    if note := cut_note(encode_rows(table, load_tokenizer(config), config), table, config):
        warnings.warn(note, stacklevel=3)


@dataclass
class _State:
    """What a search keeps on the disk while it goes on, beside its trials: nothing of it leaves, and all goes at its end.

    Attributes:
        asked: settings of the search, with which it goes on.
        uniform: what the number of trials is drawn from.
        judging: whether each row judges, by a coin of its own, so that no row's place depends on another's.
        done: score and folder of each finished trial.
    """

    path: Path
    asked: Any
    uniform: float
    judging: list[bool]
    done: list[tuple[float, str]]

    @classmethod
    def begin(cls, work: Path, asked: Any, table: Rows, share: float) -> _State:
        random = secrets.SystemRandom()
        judging = [random.random() < share for _ in table.lines]
        return cls(work / "search.json", asked, random.random(), judging, [])

    @classmethod
    def read(cls, work: Path, asked: Any) -> _State:
        path = work / "search.json"
        if not path.exists():
            raise ConfigError(f"there is no search to resume in {work.parent}: it is finished, or was never begun")
        state = cls(path, **json.loads(path.read_text()))
        if json.loads(json.dumps(asked, default=str)) != state.asked:
            raise ConfigError(
                "a search that is resumed keeps its settings, its candidates and its data: these are others"
            )
        return state

    def save(self) -> None:
        """In one piece, readable by its owner alone."""
        files.write(self.path, json.dumps({k: v for k, v in vars(self).items() if k != "path"}, default=str))


_NAME = "best of a secret number of DP-SGD runs"


def _combinations(config: FinetuneConfig, candidates: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    for name, values in candidates.items():
        if name not in FREE:
            raise ConfigError(
                f"{name} cannot be searched: choose among {', '.join(FREE)}, on which the cost of a trial does not depend"
            )
        if not values:
            raise ConfigError(f"no value of {name} is given")
        for value in values:
            try:
                TYPES[name](value)
            except (TypeError, ValueError):
                raise ConfigError(f"{name} must be {TYPE_WORDS[TYPES[name]]}, not {value!r}") from None
    found = []
    for values in itertools.product(*candidates.values()):
        settings = {name: TYPES[name](value) for name, value in zip(candidates, values)}
        dataclasses.replace(config, **settings).check()
        found.append(settings)
    return found


def _check(config: FinetuneConfig, trials: float, shape: float, held_out: float) -> None:
    if config.user_column:
        raise ConfigError(
            "a search of settings protects rows: leave user_column out, or run fastdp finetune with fixed settings"
        )
    if config.method != "dpsgd" or config.method_options:
        raise ConfigError("a search trains by dpsgd without method_options, whose steps are all that a trial releases")
    if config.epsilon is None or not math.isfinite(config.epsilon):
        raise ConfigError("a search needs a finite epsilon, which it shares among its trials")
    if config.task not in JUDGED:
        raise ConfigError(f"trials of {config.task} cannot be judged: a search knows {' and '.join(JUDGED)}")
    if config.private_metrics is not None:
        raise ConfigError("a search releases no curves: leave out private_metrics")
    if not 0 < held_out < 1:
        raise ConfigError(f"held_out is {held_out}: it must lie between 0 and 1")
    try:
        renyi.check_stopping(shape, renyi.stop_for(trials, shape))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _cost(config: FinetuneConfig, count: int, shape: float, stop: float) -> Callable[[float], tuple[Any, float]]:
    """From a step's noise multiplier to the event of the search, and the noise multiplier of a score."""
    rate, per_epoch = config.batch_size / count, math.ceil(count / config.batch_size)
    steps = math.ceil(config.epochs * per_epoch)
    sampling: Any = config.sampling

    def cost(multiplier: float) -> tuple[Any, float]:
        training = accounting.dpsgd(multiplier, rate, steps, sampling, per_epoch)
        # About as dear as the training, in the limit of many steps (Bu et al. 2020): an example meets one of the two.
        squared = steps * rate**2 * math.expm1(min(multiplier**-2, 50.0))
        judging = max(0.5, 1 / math.sqrt(squared))
        return accounting.chosen([training, accounting.gaussian(judging)], shape, stop), judging

    return cost


def _judge(folder: Path, judges: Rows, multiplier: float, stream: NoiseStream) -> float:
    """The mean bounded loss of the judges, with noise: each moves the sum by at most 1."""
    model, tokenizer, config = load_saved(folder)
    examples = encode_rows(judges, tokenizer, config)
    collator = Collator(tokenizer.pad_token_id)  # type: ignore[arg-type]
    losses = scores(model, examples, collator, config.task, config.precision)[:, :1]
    return noised_means(losses, multiplier, stream)[0] * LARGEST_LOSS


def _publish(
    config: FinetuneConfig,
    best: Path,
    score: float,
    event: Any,
    ledger: accounting.Ledger,
    search: Mapping[str, Any],
    *,
    chat: bool,
) -> TuneResult:
    """Put the best trial's weights in the place of a run's, with the card of the whole ``search``."""
    output = Path(str(config.output))
    own = accounting.Card.load(best / "card.json")
    won = dataclasses.replace(
        load_config(best / CONFIG), train=config.train, encoding=config.encoding, output=config.output
    )
    settings = {name: getattr(won, name) for name in search["candidates"]}
    weights = next(best / name for name in (ADAPTER_FOLDER, MODEL_FOLDER) if (best / name).is_dir())
    released = [t for file in sorted(weights.glob("*.safetensors")) for t in load_file(file).values()]
    claim = accounting.Gaussian("example", "add_remove", event, config.delta, config.epsilon)
    card = accounting.Card.of(
        claim,
        mechanism={"name": _NAME, "max_grad_norm": won.max_grad_norm},
        noise_source=own["noise_source"],
        weights=released,
        run_id=ledger.run_id,
        ledger_head=ledger.head,
        assumptions=[
            *own["assumptions"],
            "how many trials were made, and how long they took, stays secret: the best one alone is released",
        ],
        unprotected=[SEARCH_TIME],
        remaining=own["remaining"],
        facts={
            "dataset_size": ledger.header["dataset_size"],
            "model": own["model"],
            "tuning": {**search, "won": settings, "noised_score": score},
        },
    )
    folder = output / weights.name
    shutil.copytree(weights, folder, dirs_exist_ok=True)
    card = card.of_files(folder)
    card.save(output / "card")
    add_usage(card.save_beside(folder), won, chat=chat)
    won.save(output / CONFIG)
    assert config.epsilon is not None
    spent = card["epsilon"]["upper_bound"]
    return TuneResult(str(output), settings, score, spent, config.delta, search["noise_multiplier_of_a_step"])
