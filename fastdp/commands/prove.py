"""`fastdp prove`: neighbouring data sets replayed through a model, and how far one record moved what would be released."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import fastdp.files as files
from fastdp.commands.flags import choice_of
from fastdp.commands.refusal import console, quiet_libraries, refusing
from fastdp.quickstart import MODEL

if TYPE_CHECKING:
    from fastdp.audit.prove import Evidence

#: The model that ships with the package, by name.
QUICKSTART = "quickstart"


@refusing
def prove_command(
    model: Annotated[str, typer.Argument()],
    data: Annotated[
        Path | None, typer.Option(help="records of the kind it will be trained on; else random tokens")
    ] = None,
    peft: Annotated[str | None, choice_of("peft")] = None,
    task: Annotated[str | None, choice_of("task")] = None,
    labels: Annotated[str | None, typer.Option(help="every label of the task, with commas between")] = None,
    text_column: Annotated[str | None, typer.Option(help="column with the text, where a run has not set it")] = None,
    label_column: Annotated[str | None, typer.Option(help="column with the label, where a run has not set it")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="longest record in tokens")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="bound on one record's gradient")] = None,
    json: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="file to write every trial to")] = None,
) -> None:
    """Remove, replace and add records, extreme ones among them, and see that no release moves by more than its bound.

    Ends with exit code 1 if one does, or if nothing could be released at all.

    MODEL: a model's folder, a run's output folder, or 'quickstart'.
    """
    quiet_libraries()
    settings: dict[str, Any] = {"peft": peft, "task": task, "labels": None if labels is None else labels.split(",")}
    settings |= {"text_column": text_column, "label_column": label_column}
    settings |= {"max_length": max_length, "max_grad_norm": max_grad_norm}
    is_quickstart = model == QUICKSTART
    with console.status("replaying neighbours"):
        evidence = _prove(Path(MODEL if is_quickstart else model), data, settings, is_quickstart=is_quickstart)
    console.print(_table(evidence))
    verdict, worst = str(evidence), evidence.worst
    if evidence and worst is not None:
        count = len(evidence.trials)
        verdict = (
            f"In {count} trials one record moved a release by at most {worst.moved:.4f} of its bound: within the bound."
        )
    console.print(verdict, soft_wrap=True)
    if json is not None:
        trials = [dataclasses.asdict(trial) for trial in evidence.trials]
        files.write_json(json, {"model": model, "holds": evidence.holds, "trials": trials})
    if not evidence:
        raise typer.Exit(1)


def _prove(folder: Path, data: Path | None, settings: dict[str, Any], *, is_quickstart: bool) -> Evidence:
    """Replay neighbours of the records in a file, of the quickstart's invented ones, or of random tokens."""
    import torch
    from torch.utils.data import DataLoader

    from fastdp.audit.prove import prove
    from fastdp.audit.saved import settings_of
    from fastdp.data import Collator, Examples, causal_examples
    from fastdp.finetune.models import load_tokenizer, load_trained
    from fastdp.finetune.tasks import encode_rows, invented_label
    from fastdp.methods.dpsgd import DPSGD
    from fastdp.tables import read_rows

    config = settings_of(folder, settings)
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    if is_quickstart and data is None:
        from fastdp.quickstart.corpus import private_records

        examples = causal_examples(tokenizer, private_records(64, 0), config.max_length)
    elif data is not None:
        table = read_rows(data, config.encoding)
        examples = encode_rows(table.take(range(min(256, len(table)))), tokenizer, config)
    else:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(len(tokenizer), (8 + i % 9,), generator=generator).tolist() for i in range(16)]
        examples = Examples(
            [{"input_ids": ids, "labels": invented_label(config, ids, i)} for i, ids in enumerate(drawn)], 0
        )
    pad = tokenizer.pad_token_id
    loader: Any = DataLoader(examples, collate_fn=Collator(pad if isinstance(pad, int) else 0))
    return prove(model, loader, method=DPSGD(max_grad_norm=config.max_grad_norm), longest=config.max_length)


def _table(evidence: Evidence) -> Table:
    table = Table(title="What one record moved, where 1 is allowed", title_justify="left")
    for heading in ("change", "of what", "moved"):
        table.add_column(heading, overflow="fold")
    for trial in evidence.trials:
        # Where all other trials hold, a refused record needs no explanation here; its error is in the file of --json.
        refused = "refused, nothing released" if evidence else f"nothing was released: {trial.said}"
        table.add_row(trial.kind, trial.what, refused if trial.moved is None else f"{trial.moved:.4f}")
    return table
