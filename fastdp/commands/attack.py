"""`fastdp attack`: what a model gives away about the data it was trained on, by the attacks of the papers."""

from __future__ import annotations

import math
import os
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import fastdp.files as files
from fastdp.commands.progress import bar
from fastdp.commands.refusal import console, quiet_libraries, refusing, style_message

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fastdp.data import Examples


@refusing
def attack_command(
    model: Annotated[Path, typer.Argument()],
    kind: Annotated[
        Literal["membership", "extraction", "reconstruction", "inversion"],
        typer.Option(metavar="KIND", help="membership, extraction, reconstruction or inversion"),
    ] = "membership",
    train: Annotated[Path | None, typer.Option(help="the data the model was trained on")] = None,
    held_out: Annotated[Path | None, typer.Option(help="membership: data of the same kind it never saw")] = None,
    reference: Annotated[
        list[Path] | None,
        typer.Option(help="membership: a model that saw neither file, for the likelihood ratio; may be repeated"),
    ] = None,
    names: Annotated[
        Path | None, typer.Option(help="extraction, reconstruction: names in the training data, one a line")
    ] = None,
    decoys: Annotated[
        Path | None, typer.Option(help="extraction, reconstruction: names of the same kind not in it, one a line")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="extraction: model before training, whose names do not count")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="extraction: texts to generate")] = 100,
    length: Annotated[int, typer.Option(min=1, help="extraction: new tokens of a text")] = 256,
    candidates: Annotated[int, typer.Option(min=1, help="reconstruction: names tried for each sentence")] = 64,
    eta: Annotated[
        float | None, typer.Option(help="inversion: noise of the released embeddings; without it, none")
    ] = None,
    blocks: Annotated[
        int,
        typer.Option(min=0, help="inversion: blocks below the cut; above 0 by optimisation, which takes seconds a row"),
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, help="most rows taken from a file, at random")] = 1000,
    text_column: Annotated[str | None, typer.Option(help="column with the text, where a run has not set it")] = None,
    label_column: Annotated[str | None, typer.Option(help="column with the label, where a run has not set it")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="examples in memory at once")] = 32,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="seed of the rows, names and texts that are drawn")] = 0,
    json: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="file to write the figures to")] = None,
) -> None:
    """Attack a model: membership, extraction or reconstruction of its training data, or inversion of its embeddings.

    MODEL: output folder of a run, or a model's folder.
    """
    quiet_libraries()
    attacked = _AttackedModel(
        model, {"text_column": text_column, "label_column": label_column}, limit, batch_size, seed
    )
    if kind == "membership":
        figures = _membership(
            attacked, _require_file(train, "train"), _require_file(held_out, "held-out"), reference or []
        )
    elif kind == "extraction":
        figures = _extraction(attacked, _require_file(names, "names"), decoys, base, samples, length)
    elif kind == "reconstruction":
        figures = _reconstruction(
            attacked, _require_file(train, "train"), _require_file(names, "names"), decoys, candidates
        )
    else:
        figures = _inversion(attacked, _require_file(train, "train"), eta, blocks)
    for title, row in figures.items():
        shown = {key: f"{value:.4f}" if isinstance(value, float) else value for key, value in row.items()}
        text = ", ".join(f"{_WORDS.get(key, key)} {value}" for key, value in shown.items() if value is not None)
        console.print(style_message((title, "bold"), f": {text}"), soft_wrap=True)
    console.print(_verdict(model, kind, list(figures.values())), soft_wrap=True)
    if json is not None:
        files.write_json(json, {"model": str(model), "kind": kind, "seed": seed, "figures": figures})


FigureTable = dict[str, dict[str, Any]]

#: Names of figures, in words.
_WORDS = {
    "auc": "area under the ROC curve",
    "auc_std": "its standard error",
    "tpr_at_1_percent": "true-positive rate at FPR 1%",
    "top1": "first guesses that are right",
    "empirical_privacy": "empirical privacy",
    "extracted": "training names found",
    "named": "listed names found",
    "planted": "training names listed",
}


def _verdict(model: Path, kind: str, rows: list[dict[str, Any]]) -> str:
    """What the attack found, in a sentence, beside what the card of the run allows any attack."""
    row = rows[-1]
    if kind == "extraction":
        return f"The texts hold {row['recall']:.1%} of the names in the training data."
    if kind == "reconstruction":
        return f"The first guess is right for {row['top1']:.1%} of the names, and by chance for {row['chance']:.1%}."
    if kind == "inversion":
        return f"The attack recovers {row['recovered']:.1%} of the tokens."
    found = max(row["tpr_at_1_percent"] for row in rows)
    said = f"At a false-positive rate of 1%, the attack finds {found:.1%} of the members"
    from fastdp.accounting import Card, verify

    card, bound = model / "card.json", None
    if os.path.lexists(card):
        if not (checked := verify(card)).guarantee:
            return f"{said}; its card bounds nothing: {checked.reason}"
        bound = Card.load(card).get("membership", {}).get("0.01")
    if bound is None:
        return f"{said}; no card beside the model bounds what others may find."
    spread = 2 * math.sqrt(bound * (1 - bound) / row["members"])
    beyond = "" if found <= bound + spread else " That is more: check that the card is of this model and these data."
    return f"{said}; its card allows any attack {bound:.1%}.{beyond}"


class _AttackedModel:
    """The model under attack, loaded, with what all attacks take from the command line."""

    def __init__(self, folder: Path, overrides: dict[str, Any], limit: int, batch_size: int, seed: int):
        from fastdp.audit.saved import load_saved

        self.overrides, self.limit, self.batch_size, self.seed = overrides, limit, batch_size, seed
        with console.status("loading the model"):
            self.model, self.tokenizer, self.config = load_saved(folder, overrides)

    def examples(self, path: Path) -> Examples:
        """At most ``limit`` rows of a file, drawn at random, encoded as the run did."""
        from fastdp.finetune.tasks import check_tokens, encode_rows
        from fastdp.tables import read_rows

        table = read_rows(path, self.config.encoding)
        found = encode_rows(table.take(self.draw(list(range(len(table))))), self.tokenizer, self.config)
        check_tokens(found, self.model, self.config)
        return found

    def draw(self, items: list[Any]) -> list[Any]:
        """At most ``limit`` of them, at random but in their order."""
        if len(items) <= self.limit:
            return items
        chosen = random.Random(self.seed).sample(range(len(items)), self.limit)
        return [items[i] for i in sorted(chosen)]

    def require(self, task: str, kind: str) -> None:
        """Raise ValueError unless the model is of the task that an attack is about."""
        if self.config.task != task:
            raise ValueError(f"the {kind} attack needs a {task} model, and this one is for {self.config.task}")

    def losses(self, model: nn.Module, examples: Examples, title: str) -> torch.Tensor:
        """The loss of each example under one of the models."""
        from fastdp.audit import example_losses
        from fastdp.data import Collator

        assert self.tokenizer.pad_token_id is not None
        with bar(title, transient=True) as progress:
            return example_losses(
                model, examples.items, Collator(self.tokenizer.pad_token_id), self.batch_size, progress
            )


def _membership(attacked: _AttackedModel, train: Path, held_out: Path, references: list[Path]) -> FigureTable:
    import torch

    from fastdp.audit import likelihood_ratio, membership
    from fastdp.audit.saved import load_saved

    members, others = attacked.examples(train), attacked.examples(held_out)
    inside = attacked.losses(attacked.model, members, "members")
    outside = attacked.losses(attacked.model, others, "others")
    figures = {"membership by loss": asdict(membership(-inside, -outside))}
    if not references:
        return figures
    rows = []
    for number, folder in enumerate(references, start=1):
        other, tokenizer, _ = load_saved(folder, attacked.overrides)
        if tokenizer.get_vocab() != attacked.tokenizer.get_vocab():
            raise ValueError(f"the reference model {folder} has another vocabulary; its likelihoods cannot be compared")
        title = f"reference {number} of {len(references)}"
        rows.append((attacked.losses(other, members, title), attacked.losses(other, others, title)))
    ratio_inside = likelihood_ratio(inside, torch.stack([row[0] for row in rows]))
    ratio_outside = likelihood_ratio(outside, torch.stack([row[1] for row in rows]))
    return figures | {"membership by likelihood ratio": asdict(membership(ratio_inside, ratio_outside))}


def _extraction(
    attacked: _AttackedModel, names: Path, decoys: Path | None, base: Path | None, samples: int, length: int
) -> FigureTable:
    from fastdp.audit import NameFinder, extraction, generate
    from fastdp.audit.saved import load_saved

    attacked.require("causal-lm", "extraction")
    planted, others = _lines(names), _lines(decoys) if decoys else []
    positions = getattr(attacked.model.config, "max_position_embeddings", None)
    length = length if positions is None else min(length, positions - 1)
    options: dict[str, Any] = {"length": length, "batch_size": attacked.batch_size, "seed": attacked.seed}
    known: set[str] = set()
    if base is not None:
        before, tokenizer, _ = load_saved(base)
        with bar("texts of the base model", transient=True) as progress:
            texts = generate(before, tokenizer, samples, progress=progress, **options)
        find = NameFinder([*planted, *others])
        known = {name for text in texts for name in find(text)}
    with bar("texts", transient=True) as progress:
        texts = generate(attacked.model, attacked.tokenizer, samples, progress=progress, **options)
    return {"extraction": asdict(extraction(texts, planted, others, known))}


def _reconstruction(
    attacked: _AttackedModel, train: Path, names: Path, decoys: Path | None, candidates: int
) -> FigureTable:
    from fastdp.audit import NameFinder, reconstruction, strike_out
    from fastdp.tables import read_rows

    attacked.require("causal-lm", "reconstruction")
    config = attacked.config
    table = read_rows(train, config.encoding)
    column = config.target_column or config.text_column or ("text" if "text" in table.columns else [*table.columns][0])
    planted = _lines(names)
    pool = sorted({*planted, *(_lines(decoys) if decoys else [])})
    find = NameFinder(planted)
    targets = [strike_out(text, found[0]) for text in table.column(column, "text_column") if (found := find(text))]
    if not targets:
        raise ValueError(f"no row of {train} holds a name of {names} in its column {column!r}")
    targets = attacked.draw(targets)
    drawn = random.Random(attacked.seed)
    tried = []
    for target in targets:
        wrong = [name for name in pool if name != target.answer]
        tried.append([target.answer, *drawn.sample(wrong, min(len(wrong), candidates - 1))])
    with bar("sentences", transient=True) as progress:
        result = reconstruction(
            attacked.model,
            attacked.tokenizer,
            targets,
            tried,
            max_length=config.max_length,
            batch_size=attacked.batch_size,
            progress=progress,
        )
    return {"reconstruction": asdict(result)}


def _inversion(attacked: _AttackedModel, train: Path, eta: float | None, blocks: int) -> FigureTable:
    import torch

    from fastdp import NoiseStream, ops
    from fastdp.audit import inversion, nearest_tokens

    if blocks and eta is not None:
        raise ValueError("eta is the noise of released embeddings: leave it out where there are blocks below the cut")
    rows = [torch.tensor(example["input_ids"]) for example in attacked.examples(train).items]
    ids = torch.cat(rows)
    table = attacked.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    if blocks:
        guessed = _states_at_cut(attacked.model, rows, table, blocks)
    elif eta is None:
        guessed = nearest_tokens(table[ids], table)
    else:
        # The nearest row to a noised embedding, which is what the attack looks for, is what private_snap returns.
        guessed = ops.private_snap(ids, table, eta, NoiseStream())
    special = torch.tensor(attacked.tokenizer.all_special_ids or [-1])
    result = inversion(guessed, ids, ~torch.isin(ids, special))
    return {"inversion": {"eta": eta, "blocks": blocks} | asdict(result)}


def _states_at_cut(model: nn.Module, rows: list[torch.Tensor], table: torch.Tensor, blocks: int) -> torch.Tensor:
    """The optimisation attack on what leaves the last of ``blocks`` blocks, row by row."""
    import torch

    from fastdp.audit import from_embeddings, optimised_tokens

    model.requires_grad_(False)

    def bottom(ids: torch.Tensor) -> torch.Tensor:
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        if blocks >= len(states):
            raise ValueError(f"the model has {len(states) - 1} blocks, fewer than {blocks}")
        return states[blocks]

    run = from_embeddings(bottom, model.get_input_embeddings())  # type: ignore[operator]
    guessed = []
    with bar("rows", transient=True) as progress:
        for done, ids in enumerate(rows, start=1):
            guessed.append(optimised_tokens(bottom(ids[None]), run, table)[0])
            progress(done, len(rows))
    return torch.cat(guessed)


def _require_file(path: Path | None, option: str) -> Path:
    if path is None:
        raise ValueError(f"this attack needs a file: name it with --{option}")
    return path


def _lines(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no UTF-8 text: write one name on each line") from None
    found = list(dict.fromkeys(line for line in lines if line))
    if not found:
        raise ValueError(f"{path} holds no names; put one on each line")
    return found
