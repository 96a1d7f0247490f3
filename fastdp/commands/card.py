"""`fastdp card`: a card in the forms that others ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

import fastdp.files as files
from fastdp.commands.privacy import card_in
from fastdp.commands.refusal import console, refusing

card_app = typer.Typer(help="Take a privacy card where people look for it.", no_args_is_help=True)


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
