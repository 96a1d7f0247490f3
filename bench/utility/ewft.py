"""EW-FT's tables 3 to 7 at laptop size: MiniLM on a slice of SST-2, at the printed epsilon and at the true one.

    python -m bench.utility.ewft --model MODEL --sst2 FOLDER --public FILE --pii FILE \\
        --json bench/results/utility/ewft.json --pictures docs/pictures

The layers below the perturbation are frozen and computed once. `paper` rows add the noise that the paper prints for its own
67,349 examples; ``true_epsilon`` is what that really costs. `sound` rows spend the printed epsilon, truly.
Attribute inference attacks the noisy codes of texts with labelled private spans, each sent as one query in inference; see
`attributes`. ``query_epsilon`` is what such a query costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdp
from fastdp import audit
from fastdp.commands.quiet import quiet_libraries
from fastdp.methods import ewft
from fastdp.methods.sap import split_model

from . import attributes, tops
from .table import Table, add_options, mean_of, measure_rows

DELTA = 1e-5
PAPER: dict[str, Any] = {"dataset_size": 67349, "batch_size": 32, "epochs": 3}
MECHANISMS = ("DP-Forward", "only EWPBA", "only autoencoder", "EW-FT")


@dataclass(frozen=True)
class Size:
    """How much is run."""

    train: int = 512
    held_out: int = 400
    length: int = 32
    lengths: tuple[int, ...] = (16, 32, 48)
    layers: tuple[int, ...] = (2, 4, 6)
    layer: int = 4
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-4
    public: int = 512
    autoencoder_passes: int = 4
    subjects: int = 720


TINY = Size(
    train=32, held_out=16, length=16, lengths=(16,), layers=(6,), layer=6, public=32, autoencoder_passes=1, subjects=60
)
FULL = Size(train=60614, held_out=872, length=64, lengths=(16, 32, 64, 128), layers=(1, 2, 3, 4, 5, 6), subjects=1500)


@cache
def printed(epsilon: float, step_distance: float) -> tuple[float, ...]:
    """Algorithm 1's multipliers for the paper's data set."""
    return tuple(
        fastdp.accounting.epoch_weighted_schedule(epsilon=epsilon, delta=DELTA, step_distance=step_distance, **PAPER)
    )


@cache
def schedule(form: str, weighted: bool, epsilon: float, step_distance: float) -> ewft.NoiseSchedule:
    """The noise of a row: falling or even, as printed (std C sigma, as DP-Forward's own code has it) or sound."""
    if form == "once":
        return ewft.release_once(epsilon, DELTA)
    if form == "paper":
        if weighted:
            return ewft.paper(printed(epsilon, step_distance), epsilon, DELTA, "C")
        return ewft.paper_uniform(PAPER["dataset_size"], PAPER["batch_size"], PAPER["epochs"], epsilon, DELTA, "C")
    if weighted:
        return ewft.shaped(printed(epsilon, step_distance), epsilon, DELTA, "epoch-weighted")
    return ewft.dp_forward(PAPER["epochs"], epsilon, DELTA)


@dataclass
class Bench:
    """Texts and hidden states, kept between rows."""

    model: Path
    sst2: Path
    public: Path
    pii: Path
    size: Size
    _held: dict[Any, Any] = field(default_factory=dict)
    _asked: dict[Any, Any] = field(default_factory=dict)

    def states(self, layer: int, length: int, seed: int) -> tuple[Any, ...]:
        """Model, texts and hidden states at a layer; those of the latest seed and layer are kept."""
        key = (layer, length, seed)
        if self._held.get("key") != key:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model)
            size, model = self.size, tops.load(self.model, seed)
            train = tops.read_texts(self.sst2 / "train.tsv", tokenizer, length, size.train, seed)
            held_out = tops.read_texts(self.sst2 / "test.tsv", tokenizer, length, size.held_out, seed)
            public = tops.read_public(self.public, tokenizer, length, size.public)
            bottom, _ = split_model(model, layer)
            states = [tops.hidden_states(bottom, texts) for texts in (train, held_out, public)]
            self._held = {"key": key, "value": (model, train, held_out, public, *states)}
        return self._held["value"]

    def subjects(self, layer: int, length: int, seed: int) -> tuple[attributes.Subjects, list[Tensor]]:
        """Texts with private attributes, known and attacked, and their hidden states at a layer; the latest are kept."""
        key = (layer, length, seed)
        if self._asked.get("key") != key:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model)
            found = attributes.read_subjects(self.pii, tokenizer, length, self.size.subjects, seed)
            bottom, _ = split_model(self.states(layer, length, seed)[0], layer)
            states = [tops.hidden_states(bottom, texts) for texts in (found.known, found.attacked)]
            self._asked = {"key": key, "value": (found, states)}
        return self._asked["value"]

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """One row of a table."""
        return self.accuracy(row) if row["part"] == "accuracy" else self.attribute_inference(row)

    def attribute_inference(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is inferred from noisy codes pooled over the sequence; without noise, from the hidden rows of its tokens."""
        model, _, _, public, _, _, public_hidden = self.states(row["layer"], row["length"], row["seed"])
        subjects, states = self.subjects(row["layer"], row["length"], row["seed"])
        texts = (subjects.known, subjects.attacked)
        if row["form"] == "none":
            known, attacked = (audit.pooled(hidden, t.mask.bool()) for hidden, t in zip(states, texts))
            return attributes.attack(subjects, known, attacked)
        torch.manual_seed(row["seed"])
        _, top = split_model(model, row["layer"])
        private = self._attach(top, self._noise(row), row, public, public_hidden)
        released = [
            # Lengths are hidden: the receiver cannot tell which rows are padding.
            torch.cat([audit.pooled(codes) for codes in private.released_codes(_batches(hidden, t.mask))])
            for hidden, t in zip(states, texts)
        ]
        found = attributes.attack(subjects, *released) | {"query_epsilon": private.inference_epsilon()}
        private.remove()
        return found

    def accuracy(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate one setting."""
        size = self.size
        model, train, held_out, public, hidden, held_hidden, public_hidden = self.states(
            row["layer"], row["length"], row["seed"]
        )
        state = {name: value.clone() for name, value in model.state_dict().items()}
        _, top = split_model(model, row["layer"])
        torch.manual_seed(row["seed"])
        noise = None if row["form"] == "none" else self._noise(row)
        private = None if noise is None else self._attach(top, noise, row, public, public_hidden)
        tops.train_top(
            top,
            lambda epoch: hidden,
            train,
            epochs=size.epochs,
            batch_size=size.batch_size,
            learning_rate=size.learning_rate,
            seed=row["seed"],
            extra=() if private is None else private.trained_parameters(),
            begin_epoch=None if private is None else private.set_epoch,
            ids=private is not None,
        )
        found: dict[str, Any] = {"accuracy": tops.accuracy(top, held_hidden, held_out)}
        if private is not None and noise is not None:
            found |= {"true_epsilon": private.epsilon(), "noise_std_over_max_norm": list(noise.ratios)}
            private.remove()
        # The top shares its weights with the model, which the next row starts from again.
        model.load_state_dict(state)
        return found

    def _noise(self, row: dict[str, Any]) -> ewft.NoiseSchedule:
        weighted = row["mechanism"] in ("only EWPBA", "EW-FT")
        return schedule(row["form"], weighted, row["epsilon"], row["step_distance"])

    def _attach(
        self, top: torch.nn.Module, noise: ewft.NoiseSchedule, row: dict[str, Any], public: tops.Texts, states: Tensor
    ) -> fastdp.EWFT:
        private = fastdp.EWFT(
            top,
            layer="embeddings",
            noise=noise,
            sequence_length=row["length"],
            dataset_size=self.size.train,
            autoencoder=row["autoencoder"] or None,
        )
        if private.autoencoder is not None:
            private.train_autoencoder(_batches(states, public.mask) * self.size.autoencoder_passes)
        return private


def _batches(states: Tensor, mask: Tensor) -> list[dict[str, Tensor]]:
    return [{"inputs_embeds": h, "attention_mask": m} for h, m in zip(states.split(32), mask.split(32))]


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """One row each, no setting twice; the first seed of everything comes first."""
    base: dict[str, Any] = {"part": "accuracy", "layer": size.layer, "length": size.length, "epsilon": 8.0}
    base |= {"step_distance": 2.0, "autoencoder": [64], "mechanism": "EW-FT"}
    changes: list[dict[str, Any]] = [{"length": length} for length in size.lengths]
    changes += [{"autoencoder": sizes} for sizes in ([4], [64], [256], [64, 4], [256, 64, 4])]
    changes += [{"step_distance": float(distance)} for distance in (1, 2, 3, 4)]
    for layer in size.layers:
        for mechanism in MECHANISMS:
            sizes = [64] if "autoencoder" in mechanism or mechanism == "EW-FT" else []
            changes.append({"layer": layer, "mechanism": mechanism, "autoencoder": sizes})
    for epsilon in (2.0, 4.0):
        changes += [
            {"epsilon": epsilon},
            {"epsilon": epsilon, "mechanism": "DP-Forward", "autoencoder": []},
        ]
    forms = [{**base, **change, "form": form} for change in changes for form in ("paper", "sound")]
    forms += [{**base, "form": "once", "mechanism": "release once", "epsilon": epsilon} for epsilon in (2.0, 4.0, 8.0)]
    forms += [
        {**base, "layer": layer, "form": "none", "mechanism": "non-private", "autoencoder": []} for layer in size.layers
    ]
    attacked = {**base, "part": "attribute inference"}
    for layer in size.layers:
        forms += [{**attacked, "layer": layer, "form": form} for form in ("paper", "sound")]
        forms.append({**attacked, "layer": layer, "form": "once", "mechanism": "release once"})
        forms.append({**attacked, "layer": layer, "form": "none", "mechanism": "non-private", "autoencoder": []})
    for seed in range(seeds):
        seen: list[dict[str, Any]] = []
        # Rows of one layer and length share hidden states.
        for form in sorted(forms, key=lambda row: (row["layer"], row["length"])):
            if form not in seen:
                seen.append(form)
                yield {**form, "seed": seed}


def step_time(model: Path, steps: int = 7, length: int = 64, batch_size: int = 32) -> dict[str, Any]:
    """Seconds of a training step with EW-FT in the middle of the model, over those of the plain step.

    The plain step is the same one, on the same frozen layers, without the perturbation; they take turns.
    """
    plain, perturbed = tops.load(model, 0), tops.load(model, 0)
    layer = 3
    private = fastdp.EWFT(
        perturbed,
        layer=layer,
        noise=ewft.uniform(1, 8.0, DELTA),
        sequence_length=length,
        dataset_size=(steps + 1) * batch_size,
    )
    assert private.autoencoder is not None
    private.autoencoder.trained_on = "public"
    private.set_epoch(1)
    below = set(private.frozen_parameters)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in below)
    batch = {
        "input_ids": torch.randint(1000, 30000, (batch_size, length)),
        "attention_mask": torch.ones(batch_size, length, dtype=torch.int64),
        "labels": torch.randint(0, 2, (batch_size,)),
    }
    optimizers = [
        torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-5),
        torch.optim.AdamW(
            [*(p for p in perturbed.parameters() if p.requires_grad), *private.trained_parameters()], lr=1e-5
        ),
    ]
    seconds: list[list[float]] = [[], []]
    for turn in range(steps + 1):
        for which, (net, optimizer) in enumerate(zip((plain.train(), perturbed.train()), optimizers)):
            ids = {"example_ids": torch.arange(batch_size) + turn * batch_size} if which else {}
            begin = time.perf_counter()
            net(**batch, **ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:
                seconds[which].append(time.perf_counter() - begin)
    medians = [sorted(times)[len(times) // 2] for times in seconds]
    return {"plain_seconds": medians[0], "ewft_seconds": medians[1], "ratio": medians[1] / medians[0]}


def plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Accuracy by layer, the noise of each schedule, and attributes inferred by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 4.2), layout="constrained")
    axes, noise, inferred = figure.subplots(1, 3)
    _plot_attributes([row for row in rows if row["part"] == "attribute inference"], inferred)
    rows = [row for row in rows if row["part"] == "accuracy"]
    layers = sorted({row["layer"] for row in rows if row["form"] == "none"})
    for form, style in (("paper", "-"), ("sound", "--")):
        for mechanism, color in (("DP-Forward", "tab:orange"), ("EW-FT", "tab:blue")):
            means = [
                mean_of(rows, "accuracy", layer=layer, form=form, mechanism=mechanism, epsilon=8.0, step_distance=2.0)
                for layer in layers
            ]
            axes.plot(layers, means, style, color=color, marker="o", label=f"{mechanism}, {form}")
    plain = [mean_of(rows, "accuracy", layer=layer, form="none") for layer in layers]
    axes.plot(layers, plain, color="grey", label="non-private")
    axes.set(xlabel="blocks before the perturbation", ylabel="accuracy", title="printed epsilon 8", xticks=layers)
    axes.legend(fontsize=8)
    drawn = set()
    for row in rows:
        ratios = tuple(row.get("noise_std_over_max_norm", ()))
        label = f"{row['mechanism']}, {row['form']}, S={row['step_distance']:g}"
        if len(ratios) > 1 and row["epsilon"] == 8.0 and (label, ratios) not in drawn and "EWPBA" not in label:
            drawn.add((label, ratios))
            noise.plot(range(1, len(ratios) + 1), ratios, marker="o", label=f"{label}: true {row['true_epsilon']:.1f}")
    noise.set(xlabel="epoch", ylabel="noise std / C", title="schedules and their true epsilon")
    noise.legend(fontsize=7)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "ewft.png", dpi=150)


def _plot_attributes(rows: list[dict[str, Any]], axes: Any) -> None:
    layers = sorted({row["layer"] for row in rows})
    for color, name in zip(("tab:blue", "tab:orange", "tab:green"), attributes.ATTRIBUTES):
        for form, style in (("none", "-"), ("paper", "--"), ("once", "-.")):
            means = [mean_of(rows, f"{name}_accuracy", layer=layer, form=form) for layer in layers]
            shown = {"none": "no noise", "paper": "paper", "once": "released once"}[form]
            axes.plot(layers, means, style, color=color, marker="o", label=f"{name}, {shown}")
        chance = [mean_of(rows, f"{name}_majority", layer=layer, form="none") for layer in layers]
        axes.plot(layers, chance, ":", color=color)
    title = "attribute inference; dotted: always the most frequent"
    axes.set(xlabel="blocks before the perturbation", ylabel="attack accuracy", title=title, xticks=layers)
    axes.legend(fontsize=7)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", type=Path, required=True, help="folder of all-MiniLM-L6-v2 or another encoder")
    parser.add_argument("--sst2", type=Path, help="folder with train.tsv and test.tsv")
    parser.add_argument("--public", type=Path, help="plain text for the autoencoders")
    parser.add_argument("--pii", type=Path, help="labelled spans, such as synth_dataset_v2.json")
    add_options(parser)
    parser.add_argument("--step-time", action="store_true", help="only the time of a step")
    options = parser.parse_args(arguments)
    quiet_libraries()
    if options.step_time:
        print(step_time(options.model), flush=True)
        return
    if options.sst2 is None or options.public is None or options.pii is None:
        parser.error("the tables need --sst2, --public and --pii")
    size = {"default": Size(), "tiny": TINY, "full": FULL}[options.size]
    bench, table = Bench(options.model, options.sst2, options.public, options.pii, size), Table(options.json)
    measure_rows(table, settings(size, options.seeds), bench.run, options.minutes)
    if options.pictures:
        plot(table.rows, options.pictures)


if __name__ == "__main__":
    main()
