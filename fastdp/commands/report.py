"""`fastdp report`: a page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fastdp.files as files
from fastdp.commands.refusal import console, refusing


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
