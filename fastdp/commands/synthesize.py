"""`fastdp synthesize`: rows that a privately tuned model writes, which its guarantee covers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import fastdp.files as files
from fastdp.commands.progress import bar
from fastdp.commands.refusal import console, quiet_libraries, refusing, style_message

if TYPE_CHECKING:
    from fastdp.finetune import FinetuneConfig
    from fastdp.tables import Rows


@refusing
def synthesize_command(
    run: Annotated[Path, typer.Argument()],
    output: Annotated[
        Path,
        typer.Option(dir_okay=False, help="file to write: JSON lines, one row each; its card is written beside it"),
    ],
    prompts: Annotated[
        Path | None, typer.Option(help="public rows with the run's prompt columns, such as one for each label")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="different texts for each prompt")] = 100,
    temperature: Annotated[float, typer.Option(help="sampling temperature; below 1 prefers likely tokens")] = 1.0,
    top_p: Annotated[float, typer.Option(help="share of the probability that tokens are drawn from")] = 0.95,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="longest text (by default by the run's max_length)")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="texts in memory at once")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="seed of the draw")] = 0,
    train: Annotated[
        Path | None, typer.Option(help="the run's training data, to count near-copies; the count is unprotected")
    ] = None,
    judge: Annotated[
        Path | None, typer.Option(help="folder of a public encoder: train a classifier of the prompt on the rows")
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="with --judge: rows with prompt and target to test the classifier")
    ] = None,
    public: Annotated[
        Path | None, typer.Option(help="with --judge: public rows of the same form, to compare with")
    ] = None,
) -> None:
    """Write synthetic rows from a privately tuned model, with the card of its run.

    RUN: output folder of a finished `fastdp finetune` with task causal-lm.
    """
    from fastdp.accounting import Card
    from fastdp.accounting.statements import SYNTHETIC
    from fastdp.audit.saved import load_saved, settings_of
    from fastdp.finetune.synthesis import Judge, TokenSampling, near_copies, synthesize, target_column
    from fastdp.tables import read_rows
    from fastdp.validate import usable_device

    _check(run, output, judge, test, public)
    quiet_libraries()
    sampling = TokenSampling(temperature, top_p, max_new_tokens, batch_size, seed)
    settings = settings_of(run)
    if judge is not None and not settings.prompt_column:
        raise ValueError("the judge learns a row's prompt from its text, and this run has none: leave judge out")
    given, records, held_out, known = (
        None if path is None else read_rows(path, settings.encoding) for path in (prompts, train, test, public)
    )
    target = target_column(settings, given)
    for table in filter(None, (records, held_out, known)):
        table.column(target, "target")  # What is missing is found before anything is written.
    with console.status("loading the model"):
        model, tokenizer, config = load_saved(run)
        model.to(usable_device("auto"))
    drawn = synthesize(model, tokenizer, config, given, count, sampling)
    wanted = count * (1 if given is None else len({tuple(_fields(row, config)) for row in given.rows}))
    rows = []
    with bar("writing") as move:
        for row in drawn:
            rows.append(row)
            move(len(rows), wanted)
    if not rows:
        raise ValueError("the model wrote nothing but empty texts: train it longer, or raise max_new_tokens")
    files.write_rows(output, rows)
    drawn_rows = {"rows": len(rows), "sha256": sha256(output.read_bytes()).hexdigest(), "statement": SYNTHETIC}
    card = Card.load(run / "card.json").with_facts(synthetic=drawn_rows)
    written = card.save(output.with_name(f"{output.stem}.card"))
    console.print(f"{len(rows)} rows written to {output}, their card to {written[0]}", soft_wrap=True)
    if len(rows) < wanted:
        console.print(f"note: the model repeats itself, so {wanted - len(rows)} of {wanted} texts are missing")
    texts = [row[target] for row in rows]
    if records is not None:
        near = near_copies(texts, records.column(target, "target"))
        console.print(
            style_message(
                ("unprotected: ", "yellow"), f"{len(near)} of {len(rows)} texts share 8 words in a row with a record"
            ),
            soft_wrap=True,
        )
    if judge is not None and held_out is not None:
        tables = {"public rows": known, "private rows (unprotected)": records}
        told = {"synthetic rows": (texts, [_label(row, config) for row in rows])}
        told |= {name: _labelled(table, config, target) for name, table in tables.items() if table is not None}
        with console.status("judging"):
            classifier = Judge(judge, _labelled(held_out, config, target), config.max_length)
            figures = [(name, classifier.accuracy(data)) for name, data in told.items()]
        for name, accuracy in figures:
            console.print(f"a classifier trained on {name}: {accuracy:.1%} right on {test}", soft_wrap=True)


def _check(run: Path, output: Path, judge: Path | None, test: Path | None, public: Path | None) -> None:
    """Refuse what cannot be done before a model is loaded."""
    from fastdp.accounting import verify

    if output.suffix.lower() != ".jsonl":
        raise ValueError(f"synthesize writes JSON lines, and {output} says otherwise: name a file that ends in .jsonl")
    if (judge is None) != (test is None):
        raise ValueError("judge and test belong together: give an encoder, and rows to test its classifier on")
    if public is not None and judge is None:
        raise ValueError("public is what the judge compares with: give judge and test too")
    card_path = run / "card.json"
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}: name the output folder of a run of fastdp finetune")
    if not card_path.exists():
        raise ValueError(f"{run} has no card.json: finish the run first, as its claim is what covers the rows")
    if not (found := verify(card_path)):
        raise ValueError(f"the card of {run} does not hold, so nothing would cover the rows: {found.reason}")


def _fields(row: dict[str, Any], config: FinetuneConfig) -> list[str]:
    return [str(row.get(name)) for name in config.prompt_column or ()]


def _label(row: dict[str, Any], config: FinetuneConfig) -> str:
    """A row's prompt, as one word for the classifier."""
    return config.separator.join(_fields(row, config))


def _labelled(table: Rows, config: FinetuneConfig, target: str) -> tuple[list[str], list[str]]:
    """Texts and labels of a table."""
    return table.column(target, "target"), [_label(row, config) for row in table.rows]
