"""`fastdp plan` and `fastdp tune`: settings before a run, by rules, or by a search that is paid for."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from fastdp.commands.refusal import console, quiet_libraries, refusing, style_message
from fastdp.commands.training import with_settings
from fastdp.finetune.config import ConfigError, listed, load_config
from fastdp.finetune.reporter import duration, memory

#: By the backward passes of a micro-batch.
_PASSES = {
    1: "one backward pass a micro-batch, whose factors fit into memory",
    2: "two backward passes a micro-batch, as memory is short; a smaller physical_batch_size may need only one",
}


@with_settings
@refusing
def plan_command(
    *,
    config: Annotated[Path | None, typer.Argument()] = None,
    examples: Annotated[
        int | None, typer.Option(help="examples, or people with --user-column (by default those of train)")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            help="tokens of an example; or the shortest, the median and the longest: 5,18,32 (by default max_length)"
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="time limit in minutes")] = None,
    passes: Annotated[float, typer.Option(help="most passes over the data")] = 10.0,
    # Flags of the last release, which say what became of them.
    gpu: Annotated[str | None, typer.Option(hidden=True)] = None,
    picture: Annotated[Path | None, typer.Option(hidden=True)] = None,
    write: Annotated[
        Path | None, typer.Option(dir_okay=False, help="YAML file for the suggested settings, for `fastdp finetune`")
    ] = None,
    overrides: dict[str, Any],
) -> None:
    """Predict the cost and the noise of a DP-SGD run at each batch size, and suggest settings; spends nothing.

    CONFIG: YAML file of settings; each can also be given as a flag. `--no-` before a setting turns it off.
    """
    from fastdp.finetune.plan import plan, with_invented_labels
    from fastdp.tables import read_rows

    quiet_libraries()
    if gpu is not None:
        raise ConfigError("--gpu was removed: plan on the machine that trains, or see fastdp bench simulate")
    if picture is not None:
        warnings.warn("--picture was removed: the table holds its figures", stacklevel=2)
    settings = load_config(config, overrides)
    if not settings.model:
        raise ConfigError("model is missing: name a model in the config or with --model")
    unit, rows = ("people" if settings.user_column else "examples"), float(settings.max_examples_per_user or 1)
    if examples is None:
        if not settings.train:
            raise ConfigError("examples is missing: give --examples, or --train to count them")
        data = read_rows(settings.train, settings.encoding)
        examples = len(data)
        if settings.user_column:
            counts = Counter(data.column(settings.user_column, "user_column"))
            examples, most = len(counts), settings.max_examples_per_user or 1
            rows = sum(min(count, most) for count in counts.values()) / examples
    lengths = _lengths(length) if length else settings.max_length
    with console.status("trying private steps ..."):
        found = plan(with_invented_labels(settings), examples, lengths, minutes, passes, rows)
    title = f"{examples} {unit}, epsilon {settings.epsilon:g} at delta {settings.delta:g}"
    # Without lines between columns no heading is cut at 80 characters.
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for heading in ("batch", "epochs", "steps", "noise", "ratio, step", "ratio, run", "time"):
        table.add_column(heading, justify="right")
    table.add_column("", no_wrap=True)
    for option in found.options:
        table.add_row(
            str(option.batch_size),
            f"{option.epochs:g}",
            str(option.steps),
            f"{option.noise_multiplier:.3f}",
            f"{option.step_ratio:.3g}",
            f"{option.run_ratio:.3g}",
            duration(option.seconds),
            style_message(("suggested", "bold")) if option == found.best else "",
        )
    console.print(table)
    console.print(
        "noise: the multiplier. ratio: the least norm of the noise over that of the signal, in one step and in the whole run."
    )
    machine, best = found.machine, found.best
    once, each = machine.once_seconds(best.batch_size, best.steps), machine.step_seconds(best.batch_size)
    console.print(
        f"time and memory {machine.where}: as suggested {duration(once)} once for checks of the model, and {each:.3g} s a step, "
        f"{1e3 * machine.release_seconds:.3g} ms of it for the release; peak {memory(machine.peak_bytes)} with "
        f"{machine.physical} examples at once"
    )
    if found.config.gradient_checkpointing:
        console.print(f"gradient checkpointing: {_PASSES[machine.backward_passes]}")
    for reason in found.reasons:
        console.print(f"- {reason}")
    if write is not None:
        found.config.save(write)
        console.print(f"written to {write}")


def _lengths(text: str) -> list[int]:
    try:
        return [int(length) for length in listed(text)]
    except ValueError:
        raise ConfigError(f"--length {text}: write whole numbers of tokens, as in 18 or 5,18,32") from None


@with_settings
@refusing
def tune_command(
    *,
    config: Annotated[Path | None, typer.Argument()] = None,
    candidates: Annotated[
        list[str] | None,
        typer.Option("--try", help="values of a setting, as in learning_rate=1e-3,4e-3; may be repeated"),
    ] = None,
    trials: Annotated[float, typer.Option(help="expected number of trials; the number itself stays secret")] = 6.0,
    shape: Annotated[
        float, typer.Option(help="shape of that number's distribution: 0 costs least, 1 varies less")
    ] = 0.0,
    held_out: Annotated[float, typer.Option(help="share of the examples that judge the trials")] = 0.1,
    resume: Annotated[bool, typer.Option("--resume", help="go on with a search that was interrupted")] = False,
    overrides: dict[str, Any],
) -> None:
    """Search settings on the private data within one budget: the best of a secret number of trials, all of it on the card.

    CONFIG: YAML file of settings; each can also be given as a flag. `--no-` before a setting turns it off.
    """
    from fastdp.finetune.tune import tune

    quiet_libraries()
    settings = load_config(config, overrides)
    with console.status("searching; trials are silent, since their number is secret"):
        found = tune(settings, _values(candidates), trials, shape, held_out, resume=resume)
    won = ", ".join(f"{name} {value}" for name, value in found.settings.items())
    console.print(style_message("won: ", (won, "bold"), f", noised loss of the judges {found.score:.3f}"))
    console.print(
        style_message(
            "privacy of the whole search: epsilon ", (f"{found.epsilon:.3f}", "bold"), f" at delta {found.delta:g}"
        )
    )
    console.print(f"written to {found.output}")
    console.print("keep secret how long the search took, which tells how many trials ran")


def _values(candidates: list[str] | None) -> dict[str, list[str]] | None:
    if not candidates:
        return None
    found: dict[str, list[str]] = {}
    for entry in candidates:
        name, equals, values = entry.partition("=")
        if not (equals and name.strip()):
            raise ConfigError(f"--try {entry}: write a setting and its values, as in learning_rate=1e-3,4e-3")
        found[name.strip()] = listed(values)
    return found
