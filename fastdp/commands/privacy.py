"""`fastdp calibrate`, `fastdp epsilon`, `fastdp verify` and `fastdp card`: what a run would cost, or did."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

import fastdp.files as files
from fastdp.commands.refusal import console, refusing, style_message

card_app = typer.Typer(help="Take a privacy card where people look for it.", no_args_is_help=True)

ExampleCount = Annotated[int, typer.Option(min=1, help="examples in the training data, N")]
BatchSize = Annotated[int, typer.Option(min=1, help="expected examples in a step, B")]
Epochs = Annotated[float, typer.Option(help="passes over the data: ceil(N / B) steps each")]
Delta = Annotated[float, typer.Option(help="probability that the guarantee may fail")]
SamplingOption = Annotated[
    Literal["poisson", "shuffled"], typer.Option(help="shuffled batches are accounted without amplification")
]
AdjacencyOption = Annotated[
    # Its usual brackets would break the word at 80 columns.
    Literal["add_remove", "replace_one"],
    typer.Option(help="what neighbouring data sets are", metavar="add_remove|replace_one"),
]
AccountantName = Literal["pld", "prv", "rdp"]


def _event(
    examples: int, batch_size: int, epochs: float, delta: float, sampling: Literal["poisson", "shuffled"]
) -> tuple[Callable[[float], Any], int]:
    """The event of a DP-SGD run as a function of its noise multiplier, and its number of steps."""
    import fastdp.accounting as accounting
    from fastdp.accounting.card import large_delta

    if batch_size > examples:
        raise ValueError(f"batch size {batch_size} exceeds the {examples} examples: the sample rate would pass 1")
    if not 0 < epochs < math.inf:
        raise ValueError(f"epochs must be a finite number above 0, not {epochs}")
    per_epoch = math.ceil(examples / batch_size)
    steps = math.ceil(epochs * per_epoch)

    if 1 / examples <= delta < 1:
        warnings.warn(f"{large_delta(delta, examples)}; fastdp finetune refuses it. Lower delta", stacklevel=2)
    rate = batch_size / examples
    return partial(accounting.dpsgd, sample_rate=rate, steps=steps, sampling=sampling, steps_per_epoch=per_epoch), steps


@refusing
def calibrate_command(
    epsilon: Annotated[float, typer.Option(help="budget to spend")],
    examples: ExampleCount,
    batch_size: BatchSize,
    epochs: Epochs,
    delta: Delta = 1e-5,
    sampling: SamplingOption = "poisson",
    adjacency: AdjacencyOption = "add_remove",
) -> None:
    """The noise that a planned DP-SGD run needs to stay within a budget."""
    import fastdp.accounting as accounting

    event, steps = _event(examples, batch_size, epochs, delta, sampling)
    sigma = accounting.calibrate(event, epsilon, delta, adjacency=adjacency)
    spent = accounting.epsilon(event(sigma), delta, adjacency=adjacency)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("noise multiplier", style_message((f"{sigma:.6f}", "bold")))
    table.add_row("epsilon", f"{spent:.6g} at delta {delta:g} (upper bound, PLD)")
    table.add_row("steps", f"{steps}, sample rate {batch_size / examples:.6g} ({sampling})")
    console.print(table)


@refusing
def epsilon_command(
    noise_multiplier: Annotated[float, typer.Option(help="noise standard deviation over sensitivity")],
    examples: ExampleCount,
    batch_size: BatchSize,
    epochs: Epochs,
    delta: Delta = 1e-5,
    sampling: SamplingOption = "poisson",
    adjacency: AdjacencyOption = "add_remove",
    compare: Annotated[
        bool, typer.Option("--compare", help="also by PRV and RDP, cross-checks that take seconds to import")
    ] = False,
) -> None:
    """What a DP-SGD run costs: the upper bound by PLD, which certifies, and with --compare those of PRV and RDP."""
    import fastdp.accounting as accounting

    if not noise_multiplier > 0:
        raise ValueError(
            f"noise_multiplier must be greater than 0, not {noise_multiplier}: without it epsilon is infinite"
        )
    event, steps = _event(examples, batch_size, epochs, delta, sampling)
    table = Table(title=f"{steps} steps at delta {delta:g}", title_justify="left")
    table.add_column("accountant")
    table.add_column("epsilon", justify="right")
    table.add_column("")
    remarks: dict[AccountantName, str] = {"pld": "upper bound, certifies"}
    if compare:
        remarks |= {"prv": "upper bound, cross-check", "rdp": "upper bound, loose"}
    for accountant, remark in remarks.items():
        try:
            figure = f"{accounting.epsilon(event(noise_multiplier), delta, accountant, adjacency=adjacency):.6g}"
        except (ValueError, RuntimeError, OverflowError, MemoryError) as error:
            if accountant == "pld":
                raise
            figure, remark = "-", f"not applicable: {error}"
        table.add_row(accountant, figure, remark)
    console.print(table)


def card_in(place: Path) -> Path:
    """The card of a run's or a model's folder; another path as it is. Raises ValueError for a folder without a card."""
    if not place.is_dir():
        return place
    names = ("card.json", "statement.json", "run_card.json")
    # A link to nothing is refused where it is read: it is no card that is not there.
    found = next((place / name for name in names if os.path.lexists(place / name)), None)
    if found is None:
        raise ValueError(f"{place} holds no card.json: name the folder of a finished run, or a card")
    return found


@refusing
def verify_command(
    card: Annotated[Path, typer.Argument()],
    weights: Annotated[
        Path | None,
        typer.Option(help="folder or .safetensors file that should hold the weights (by default those of the folder)"),
    ] = None,
    ledger: Annotated[Path | None, typer.Option(help="ledger.jsonl of the run (by default that of the folder)")] = None,
) -> None:
    """Work out again what a card claims, compare it with weights and ledger where given, and say what was not checked.

    Ends with exit code 1 unless the card holds and certifies a guarantee.

    CARD: folder of a run, its card.json, or the statement of a perturbation.
    """
    import fastdp.accounting as accounting

    if card.is_dir():
        folder, card = card, card_in(card)
        # Of a perturbation, the folder's tensors are no weights.
        weights = weights or (folder if accounting.Card.load(card).get("weights") else None)
        ledger = ledger or next((path for path in [folder / "ledger.jsonl"] if os.path.lexists(path)), None)
    result = accounting.verify(card, weights=weights, ledger=ledger)
    if not result:
        raise ValueError(f"{card} does not hold: {result.reason}")
    if not result.guarantee:
        raise ValueError(f"{card} certifies no guarantee: {result.reason}")
    console.print(style_message(("holds", "bold"), f": {result.reason}"))
    if result.unchecked:
        console.print("not checked:")
    for entry in result.unchecked:
        console.print(f"- {entry}")


@card_app.command("export")
@refusing
def export_command(
    card: Annotated[Path, typer.Argument()],
    form: Annotated[
        Literal["huggingface", "registry", "nist", "html"],
        typer.Option(
            "--format", help="README of a model, entry of the deployments registry, NIST SP 800-226, or a page"
        ),
    ] = "html",
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="file to write (by default beside the card)")
    ] = None,
) -> None:
    """Write a card as a model's README, a registry's entry, an evaluation's outline or a page; `fastdp verify` takes each.

    CARD: folder of a run, its card.json, or the statement of a perturbation.
    """
    from fastdp.accounting import Card, verify
    from fastdp.accounting.exports import SUFFIXES, export

    card = card_in(card)
    found = verify(card)
    if not found:
        raise ValueError(f"{card} does not hold, so it is not passed on: {found.reason}")
    path = output or card.with_name(f"{card.stem}-{form}{SUFFIXES[form]}")
    files.write(path, export(Card.load(card), form), public=True)
    console.print(f"written to {path}", soft_wrap=True)
    if form == "registry":
        console.print("what only you know is marked TO FILL IN")
