"""`fastdp finetune`, `fastdp quickstart` and `fastdp report`."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

import fastdp.files as files
from fastdp.commands.flags import with_flags
from fastdp.commands.refusal import console, errors, quiet_libraries, refusing, style_message
from fastdp.finetune.config import TYPES, FinetuneConfig, load_config
from fastdp.finetune.reporter import Forecast, Reporter, duration, memory

if TYPE_CHECKING:
    from fastdp.finetune import Result


class _Bar(Progress):
    """A bar of steps, and its state on a line below: both have room in a terminal of 80 columns."""

    state = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.state)


class ProgressReporter(Reporter):
    """Draws a run as lines of phases, a bar of steps and how they stand."""

    def __init__(self, title: str = "") -> None:
        self.title = title
        self.epsilon = ""
        self.bar: TaskID | None = None
        self.progress = _Bar(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), console=console
        )

    def __enter__(self) -> ProgressReporter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def phase(self, text: str) -> None:
        self.progress.console.print(style_message((f"{self.title}{text}", "dim")))

    def note(self, text: str) -> None:
        self.progress.console.print(style_message(("note:", "yellow"), f" {text}"))

    def forecast(self, expected: Forecast) -> None:
        self.progress.console.print(f"{self.title}to come: {expected.in_words()}")

    def step(self, done: int, total: int, loss: float, epsilon: float | None, left: Forecast) -> None:
        if self.bar is None:
            self.bar = self.progress.add_task("steps", total=total)
        if epsilon is not None and math.isfinite(epsilon):
            self.epsilon = f"  epsilon {epsilon:.2f}" + ("" if left.epsilon is None else f" of {left.epsilon:g}")
        self.progress.state = (
            f"loss {loss:.3f} (unprotected){self.epsilon}  {memory(left.peak_bytes)}  {duration(left.seconds)} left"
        )
        self.progress.update(self.bar, completed=done)


def _flags(field: dataclasses.Field[Any]) -> Iterator[inspect.Parameter]:
    # Lists and mappings come as one value, as in the YAML file's short form.
    kind: Any = str if TYPES[field.name] in (list, dict) else TYPES[field.name]
    text, name = field.metadata["help"], field.name.replace("_", "-")
    if field.default is not None:
        text += f" (default {field.default!r})"
    # A column of --no-... would leave the others too narrow for their words.
    negated = [typer.Option(f"--no-{name}", hidden=True)] if kind is bool else []
    for option in [typer.Option(f"--{name}", help=text, show_default=False), *negated]:
        named = _NEGATED * (option in negated) + field.name
        hint = Annotated[kind | None, option]  # type: ignore[valid-type]
        yield inspect.Parameter(named, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _overrides(**values: Any) -> dict[str, Any]:
    negated = {name.removeprefix(_NEGATED) for name, value in values.items() if name.startswith(_NEGATED) and value}
    given = {name: value for name, value in values.items() if not name.startswith(_NEGATED)}
    if both := next((name for name in negated if given[name]), None):
        raise typer.BadParameter(f"--{both.replace('_', '-')} and --no-{both.replace('_', '-')}: give one of them")
    return given | dict.fromkeys(negated, False)


#: Prefix of the parameter that turns a setting off.
_NEGATED = "no_"
#: Flags for every setting of `FinetuneConfig`, passed on as a dict named `overrides`.
with_settings = with_flags(
    [flag for field in dataclasses.fields(FinetuneConfig) for flag in _flags(field)], "overrides", _overrides
)


@with_settings
@refusing
def finetune_command(
    *,
    config: Annotated[Path | None, typer.Argument()] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with an interrupted run in the output folder")
    ] = False,
    overrides: dict[str, Any],
) -> None:
    """Fine-tune a model on private data; every setting of the config can also be given as a flag.

    CONFIG: YAML file of settings. `--no-` before a setting that it turns on turns it off.
    """
    if resume and config is None and overrides["model"] is None and overrides["output"] is not None:
        config = Path(overrides["output"]) / "config.yaml"
    # Before libraries are imported, which takes seconds.
    settings = load_config(config, overrides)
    settings.check()
    from fastdp.finetune import finetune

    quiet_libraries()
    output = Path(str(settings.output))
    before = {path.name for path in output.iterdir()} if output.is_dir() and not resume else set()
    try:
        with ProgressReporter() as reporter:
            result = finetune(settings, resume=resume, reporter=reporter)
    except KeyboardInterrupt:
        errors.print(_stopped(settings))
        raise typer.Exit(130) from None
    _print_result(result, before)


def _stopped(settings: FinetuneConfig) -> str:
    """What an interrupted run leaves, in a sentence."""
    from fastdp.finetune.methods import LOCAL

    if not (Path(str(settings.output)) / "config.yaml").exists():
        return "stopped before anything was released: nothing was spent, and there is nothing to resume"
    if settings.method in LOCAL:
        return f"stopped; a run of {settings.method} cannot be resumed, and {settings.output} records what it released"
    return "stopped; the same command with --resume goes on from the last checkpoint, and what was spent stays spent"


def _print_result(result: Result, before: Collection[str]) -> None:
    from fastdp.accounting.claim import two_decimals

    if result.before and result.after:
        console.print(
            style_message(f"held out: {result.before.headline} before, ", (result.after.headline, "bold"), " after")
        )
    if result.privacy is not None:
        console.print(f"privacy: {result.privacy}")
    elif math.isfinite(result.epsilon):
        console.print(
            style_message(
                "privacy: epsilon ",
                (two_decimals(result.epsilon), "bold"),
                f" at delta {result.delta:g} (noise multiplier {result.noise_multiplier:.4f}, {result.steps} steps)",
            )
        )
    else:
        console.print(style_message("privacy: ", ("none", "bold"), " (epsilon is infinite)"))
    console.print(
        f"speed: {result.seconds_per_step:.2f} s a step, peak memory {memory(result.peak_bytes)}, "
        f"{result.trained_parameters:,} trained parameters"
    )
    written = sorted({path.name for path in Path(result.output).iterdir()}.difference(before))
    console.print(f"written to {result.output}: {', '.join(written)}")


@refusing
def quickstart_command(
    output: Annotated[Path, typer.Option(help="folder for the runs")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="seed of the generated records and of new weights")] = 0,
    records: Annotated[
        int, typer.Option(help="how many records to train on; fewer take less time and teach less")
    ] = 3072,
) -> None:
    """Fine-tune a small model on invented records, without and with privacy, and compare; needs no network."""
    from fastdp.quickstart.run import quickstart

    quiet_libraries()
    quickstart(output, seed, console, ProgressReporter, records)


@refusing
def report_command(
    runs: Annotated[list[Path], typer.Argument()],
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="page to write (by default report.html in the run's folder, or beside the first)"
        ),
    ] = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="leave out what the guarantee does not cover, so that it can be shown around"),
    ] = False,
) -> None:
    """Write one HTML page about a run, or several side by side: card, epsilon and loss, what was trained, samples, notes.

    RUNS: output folders of `fastdp finetune`, finished or not.
    """
    from fastdp.finetune.report import build_report

    page = build_report(runs, public=public)
    path = output or (runs[0] if len(runs) == 1 else runs[0].resolve().parent) / "report.html"
    files.write(path, page, public=public)
    console.print(f"written to {path}", soft_wrap=True)
