"""`fastdp bench`: the benchmarks, each of which writes its figures with device, versions and commit."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastdp.commands.refusal import console, refusing

bench_app = typer.Typer(help="Measure this machine: steps, kernels, the planner.", no_args_is_help=True)
SUITES = ("rapft", "names", "frost", "ewft", "sap", "federated")

Json = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="write the rows, with device, versions and commit")
]


@bench_app.command("step")
@refusing
def step_command(
    case: Annotated[str, typer.Option(help="one case, or 'all' for every CPU case, 'gpu' for every GPU case")] = "all",
    steps: Annotated[int, typer.Option(help="steps timed")] = 7,
    json: Json = None,
) -> None:
    """Time and memory of one training step: non-private, fastdp, and Opacus in both its modes."""
    from fastdp.bench import step as bench

    large = [name for name, c in bench.CASES.items() if c.gpu]
    groups = {
        "all": [(name, None) for name, c in bench.CASES.items() if not c.gpu],
        # Torch's compiler and other libraries last: it is theirs that time may be short of.
        "gpu": [
            *((name, None) for name in large),
            *((name, bench.COMPILED_ON_A_GPU) for name in ("bert-base-full", "llama-1b-full")),
            *((name, bench.OTHERS_ON_A_GPU) for name in large),
        ],
    }
    rows: list[dict[str, Any]] = []
    for name, chosen in groups.get(case, [(case, None)]):
        with console.status(f"{name} ..."):
            found = bench.measure(name, steps, implementations=chosen)
        found = found[1:] if chosen else found
        _print(name, found)
        rows += found
        _write(json, rows)


@bench_app.command("simulate")
@refusing
def simulate_command(
    case: Annotated[str, typer.Option(help="one case, or 'all'")] = "all",
    gpu: Annotated[str, typer.Option(help="h100 or h200, or 'all'")] = "all",
    noise_rounds: Annotated[int, typer.Option(help="rounds of the noise's ChaCha: 20 or 12")] = 20,
    two_pass: Annotated[bool | None, typer.Option(help="backward passes; by default as memory allows")] = None,
    json: Json = None,
) -> None:
    """SIMULATED steps: the real engine on tensors without data, each operation priced by a table; nothing is measured."""
    from fastdp.bench import simulate as bench

    rows: list[dict[str, Any]] = []
    for name in bench.CASES if case == "all" else [case]:
        for kind in bench.GPUS if gpu == "all" else [gpu]:
            with console.status(f"{name} on {kind}, simulated ..."):
                found = bench.measure(name, kind, noise_rounds, two_pass)
            _print(f"{name} on {found[0]['gpu']}, SIMULATED", found, "case", "gpu", "dearest")
            rows += found
            _write(json, {"simulated": True, "prices": bench.prices(), "rows": rows})


@bench_app.command("kernels")
@refusing
def kernels_command(
    only: Annotated[str | None, typer.Option(help="only ops whose name holds this")] = None,
    turns: Annotated[int, typer.Option(help="runs of each")] = 7,
    sizes: Annotated[str | None, typer.Option(help="cpu, cuda or small; by default those of the device")] = None,
    compiled: Annotated[bool, typer.Option(help="also time what torch.compile makes of the formulas")] = True,
    json: Json = None,
) -> None:
    """Each op against its floor and its alternatives; nothing is timed whose result is wrong."""
    from fastdp.bench import micro as bench

    rows: list[dict[str, Any]] = []
    for row in _each("kernels ...", bench.measure(turns, only, sizes, compiled)):
        rows.append(row)
        _print(f"{row['op']} {row.get('size', '')}", [row], "op", "size")
        _write(json, rows)
    if any("failed" in row for row in rows):
        raise typer.Exit(1)


@bench_app.command("planner")
@refusing
def planner_command(json: Json = None) -> None:
    """Refit the planner's constants on this device, and compare its predictions with measurements."""
    from fastdp.bench import planner as bench

    with console.status("planner ..."):
        figures = bench.measure()
    _print("constants", [figures["constants"]])
    _print("predicted against measured", figures["rows"])
    _write(json, figures)


@bench_app.command("utility", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@refusing
def utility_command(
    context: typer.Context,
    suite: Annotated[str, typer.Option(help=f"one of {', '.join(SUITES)}; its own options follow (see -- --help)")],
) -> None:
    """A paper's comparison at equal true epsilon; rows are written as they come, and the same command goes on from there.

    Suites take --json, --only, --seeds, --minutes, --size default|tiny, and the paths of models and data.
    """
    if suite not in SUITES:
        raise ValueError(f"there is no suite '{suite}'; choose one of {', '.join(SUITES)}")
    importlib.import_module(f"fastdp.bench.utility.{suite}").main(context.args)


@bench_app.command("attacks")
@refusing
def attacks_command(
    only: Annotated[
        str | None, typer.Option(help="only attacks whose name contains this; the file keeps its other rows")
    ] = None,
    json: Json = None,
    document: Annotated[Path | None, typer.Option(help="page whose table is replaced, such as docs/attacks.md")] = None,
) -> None:
    """Try to move a release by more than its bound."""
    from fastdp.bench.attacks import run
    from fastdp.bench.record import insert

    rows: list[dict[str, Any]] = []
    for row in _each("attacks ...", run.measure(only)):
        rows.append(row)
        console.print(f"{row['attack']}: {run.cell(row)}", f"  {row['shows']}", sep="\n")
    every = run.merged(json if only else None, rows)
    _write(json, {"attacks": every})
    if document is not None:
        insert(document, run.table(every))
    through = [row["attack"] for row in rows if not run.is_held(row)]
    if through:
        raise ValueError(f"{len(through)} of {len(rows)} attacks succeeded: {', '.join(through)}")


@bench_app.command("plot")
@refusing
def plot_command(
    results: Annotated[Path, typer.Option(help="folder with kernels.json and planner.json")] = Path(
        "bench/results/cpu"
    ),
    output: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("docs/pictures"),
    document: Annotated[Path, typer.Option(help="page whose table of ops is written anew")] = Path("docs/kernels.md"),
) -> None:
    """Write the table of ops from result files, and draw the planner's predictions and README's picture."""
    from fastdp.bench import plots
    from fastdp.bench.record import insert

    insert(document, plots.table(results / "kernels.json"))
    plots.planner(results / "planner.json", output / "planner.png")
    plots.overview(output / "overview.png")
    console.print(f"wrote the table of {document}", f"wrote {output}/planner.png and overview.png", sep="\n")


def _each(status: str, measured: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is measured, one after another, with a status while each takes its time."""
    while True:
        with console.status(status):
            row = next(measured, None)
        if row is None:
            return
        yield row


def _print(title: str, rows: list[dict[str, Any]], *untold: str) -> None:
    """A table of the rows, but for some of their columns."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in untold))
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key, overflow="fold")
    for row in rows:
        values = (row.get(key, "") for key in keys)
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)


def _write(path: Path | None, figures: Any) -> None:
    if path is not None:
        from fastdp.bench.record import write

        write(path, figures)
