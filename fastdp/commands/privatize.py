"""`fastdp privatize`: a file of texts in, the same file with every text privatized out."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import typer

import fastdp.files as files
from fastdp.commands.contributing import Contributing, show_contributing, show_displacement, with_contributing
from fastdp.commands.progress import bar
from fastdp.commands.refusal import console, quiet_libraries, refusing
from fastdp.untrusted import load_pretrained, load_pretrained_tokenizer

if TYPE_CHECKING:
    from fastdp.tables import Rows


_SUFFIXES = (".csv", ".tsv", ".jsonl", ".txt")
STATEMENT_SUFFIX = ".privacy.json"


@with_contributing
@refusing
def privatize_command(
    source: Annotated[Path, typer.Argument(metavar="IN")],
    target: Annotated[Path, typer.Argument(metavar="OUT")],
    model: Annotated[str, typer.Option(help="folder or name of the model whose embeddings and tokenizer are used")],
    eta: Annotated[
        float | None, typer.Option(help="privacy parameter in units of 1 / distance; small is private")
    ] = None,
    text_column: Annotated[str, typer.Option(help="column with the text")] = "text",
    keep: Annotated[
        list[str] | None, typer.Option(help="column to copy AS IT IS, unprotected; may be repeated")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="write token ids instead of text (.jsonl)")] = False,
    mechanism: Annotated[
        Literal["laplace", "exponential"] | None,
        typer.Option(help="noise and nearest row (the default without --cti), or the exponential mechanism"),
    ] = None,
    label_column: Annotated[str, typer.Option(help="column with the class, for --cti")] = "label",
    label: Annotated[
        list[str] | None, typer.Option(help="a class of --cti, which counts as public; name every one")
    ] = None,
    unknown: Annotated[Literal["perturb", "refuse"], typer.Option(help="what to do with unknown words")] = "perturb",
    merge_duplicates: Annotated[
        bool, typer.Option("--merge-duplicates", help="let tokens with equal rows answer for one another")
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="compute what a token really costs on this table: minutes for large ones")
    ] = False,
    device: Annotated[str, typer.Option(help="where the table is and draws are made; auto takes a GPU")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT if it exists")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="release texts that were released before once more; their costs add up")
    ] = False,
    *,
    counting: Contributing,
) -> None:
    """Replace every token of every text by a random near one, so that the file may leave (metric privacy, d_chi).

    IN: texts, as .csv, .tsv, .jsonl or .txt.

    OUT: file to write, of one of these kinds. What holds is written beside it.

    Only the text column and the columns named by --keep are written.
    """
    quiet_libraries()
    from transformers import AutoModel

    from fastdp import TextPrivatizer
    from fastdp.accounting.witness import check_release, count_release
    from fastdp.tables import read_rows
    from fastdp.validate import usable_device

    _check_target(source, target, ids, overwrite, keep)
    there, chosen, classes = usable_device(device), counting.validated(eta), label or []
    _check_noise(eta, exact, counting)
    _check_classes(classes, chosen is not None)
    rows = read_rows(source)
    texts = rows.column(text_column, "--text-column")
    kept = {name: rows.column(name, "--keep") for name in keep or []}
    if text_column in kept:
        raise ValueError(f"--keep {text_column} would copy the text itself: leave it out")
    if chosen is not None:
        counts = rows if chosen.cti_public is None else read_rows(chosen.cti_public)
        counted = counts.column(text_column, "--text-column"), class_numbers(counts, label_column, classes)
        origin = chosen.admit(counted[0], {source: texts})
    table = load_pretrained(AutoModel, model).get_input_embeddings().weight
    tokenizer = load_pretrained_tokenizer(model)
    cti = None if chosen is None else chosen.count(tokenizer, table.shape[0], *counted, len(classes), origin)
    if cti is not None:
        show_contributing(cti)
    privatizer = TextPrivatizer(
        table.to(there),
        eta=eta,
        epsilon=counting.epsilon,
        tokenizer=tokenizer,
        mechanism=mechanism,
        cti=cti,
        unknown=unknown,
        duplicates="merge" if merge_duplicates else "refuse",
    )
    shown = show_displacement(privatizer)
    if exact:
        nats = privatizer.nats_per_distance()
        console.print(f"a token costs at most {nats:.4g} nats for each unit of distance, of eta {privatizer.eta:g}")
    check_release(texts, again)
    # A label that leaves anyway may say which tokens are favoured; one that stays must not show in them.
    known = class_numbers(rows, label_column, classes) if chosen and label_column in kept else None
    done = privatizer.stream_texts(texts, known, output="ids" if ids else "text")
    begin = time.perf_counter()
    with files.atomic_path(target, public=True) as aside:
        with open(aside, "w", encoding="utf-8", newline="") as file:
            _write(file, target.suffix.lower(), text_column, kept, _watched(done, len(texts)))
        # What was drawn in vain, before a stop, is no release.
        earlier = count_release(texts, privatizer.in_short, target, again)
    rate = privatizer.tokens_released / max(time.perf_counter() - begin, 1e-9)
    card = privatizer.statement().with_facts(displacement=vars(shown), columns_copied_unprotected=list(kept))
    path = target.with_suffix(STATEMENT_SUFFIX)
    files.write(path, card.after(earlier).to_json(), public=True)
    console.print(f"{len(texts):,} texts, {privatizer.tokens_released:,} tokens, {rate:,.0f} tokens a second")
    console.print(f"wrote {target} and {path}")


def _check_target(source: Path, target: Path, ids: bool, overwrite: bool, keep: list[str] | None) -> None:
    if target.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{target} is of no known kind: use one of {', '.join(_SUFFIXES)}")
    if ids and target.suffix.lower() != ".jsonl":
        raise ValueError("--ids needs a .jsonl file to write lists of ids to")
    if target.resolve() == source.resolve():
        raise ValueError("OUT is IN: the private texts would be overwritten")
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists: choose another file, or pass --overwrite")
    if keep and target.suffix.lower() == ".txt":
        raise ValueError("a .txt file holds texts alone: write .csv, .tsv or .jsonl to keep columns")


def _check_noise(eta: float | None, exact: bool, counting: Contributing) -> None:
    from fastdp.methods.sap.importance import check_eta

    if exact and counting.cti == "quotient":
        raise ValueError("--exact is a cost for each unit of distance, and the quotient has none: leave it out")
    if eta is not None:
        check_eta(eta)
    elif counting.epsilon is None:
        raise ValueError(
            "--eta is missing: choose how much a text's tokens are changed, such as 14 with --mechanism exponential"
        )


def _check_classes(classes: list[str], counted: bool) -> None:
    if classes and not counted:
        raise ValueError("--label names the classes of --cti: give its form, or leave --label out")
    if counted and len(set(classes)) < max(2, len(classes)):
        raise ValueError("--cti tells classes apart: name each of them once with --label, two at least")


def class_numbers(rows: Rows, column: str, classes: list[str]) -> list[int]:
    """The labels as places in the list of classes. Raises ValueError, with the line, for one that is not in it."""
    labels = rows.column(column, "--label-column")
    for index, label in enumerate(labels):
        if label not in classes:
            raise ValueError(f"{rows.place(index)}: the label {label!r} is not among --label {', '.join(classes)}")
    return [classes.index(label) for label in labels]


def _watched(values: Iterator[Any], total: int) -> Iterator[Any]:
    with bar("texts") as move:
        move(0, total)
        for done, value in enumerate(values, start=1):
            yield value
            move(done, total)


def _write(file: IO[str], kind: str, text_column: str, kept: dict[str, list[str]], values: Iterator[Any]) -> None:
    rows = ([value, *(column[at] for column in kept.values())] for at, value in enumerate(values))
    if kind == ".jsonl":
        for value, *others in rows:
            name = text_column if isinstance(value, str) else "input_ids"
            file.write(json.dumps({name: value, **dict(zip(kept, others))}, ensure_ascii=False) + "\n")
    elif kind == ".csv":
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([text_column, *kept])
        writer.writerows(rows)
    else:
        if kind == ".tsv":
            file.write("\t".join([text_column, *kept]) + "\n")
        file.writelines("\t".join(map(_on_one_line, row)) + "\n" for row in rows)


def _on_one_line(text: str) -> str:
    return " ".join(text.split()) if any(mark in text for mark in "\t\r\n") else text
