"""EW-FT's tables 3 to 7 at laptop size: MiniLM on a slice of SST-2, at the printed epsilon and at the true one.

    python -m bench.utility.ewft --model MODEL --sst2 FOLDER --public FILE \\
        --json bench/results/utility/ewft.json --pictures docs/pictures

The lower blocks (`Size.frozen`) are frozen in every row and computed once. What is trained below the noise differs by row:

- ``bottom: private``: the blocks between learn from the private texts, below the noise, as in the paper. No guarantee.
- ``bottom: public``: they learn, under the same clip and noise, from other labelled texts that count as public, and are then
  frozen; the blocks above the noise go on to learn from the private texts.
- ``bottom: pretrained``: nothing below the noise learns.

`paper` rows add the noise that the paper prints for its own 67,349 examples; ``true_epsilon`` is what these releases really
cost. `sound` and `once` rows spend the printed epsilon, truly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import fastdp
from fastdp.methods import ewft
from fastdp.methods.sap import split_model
from fastdp.untrusted import load_pretrained

from ..plots import picture
from . import suite, tops

DELTA = 1e-5
PAPER: dict[str, Any] = {"dataset_size": 67349, "batch_size": 32, "epochs": 3}
MECHANISMS = ("only EWPBA", "EW-FT")


@dataclass(frozen=True)
class Size:
    """How much is run."""

    train: int = 2048
    public: int = 2048
    unlabelled: int = 512
    held_out: int = 872
    length: int = 16
    lengths: tuple[int, ...] = (16, 32)
    frozen: int = 4
    layers: tuple[int, ...] = (4, 5, 6)
    layer: int = 6
    epochs: int = 3
    batch_size: int = 32
    learning_rate: float = 2e-4
    autoencoder_passes: int = 4


TINY = Size(train=32, public=32, unlabelled=32, held_out=16, lengths=(16,), layers=(5, 6), autoencoder_passes=1)
FULL = Size(train=40000, public=20000, length=64, lengths=(16, 32, 64, 128), frozen=0, layers=(1, 2, 3, 4, 5, 6))


#: Codes without a delta, by their number: two learn from labels, the others from what varies most.
PURE = {"codebook 2": 2, "codebook 16": 16}


@cache
def printed(epsilon: float, step_distance: float) -> tuple[float, ...]:
    """Algorithm 1's multipliers for the paper's data set."""
    return tuple(
        fastdp.accounting.epoch_weighted_schedule(epsilon=epsilon, delta=DELTA, step_distance=step_distance, **PAPER)
    )


@cache
def schedule(form: str, epsilon: float, step_distance: float) -> ewft.NoiseSchedule:
    """The noise of a row: falling as printed (std C sigma), or sound."""
    if form == "once":
        return ewft.release_once(epsilon, DELTA)
    if form == "paper":
        return ewft.paper(printed(epsilon, step_distance), epsilon, DELTA, "C")
    return ewft.dp_forward(PAPER["epochs"], epsilon, DELTA)


@dataclass(frozen=True)
class Part:
    """Texts and their hidden states [N, T, d] after the frozen blocks."""

    texts: tops.Texts
    states: Tensor

    def batches(self) -> list[dict[str, Tensor]]:
        """Inputs of the model above, without labels."""
        pairs = zip(self.states.split(32), self.texts.mask.split(32))
        return [{"inputs_embeds": states, "attention_mask": mask} for states, mask in pairs]


@dataclass
class Bench:
    """Texts and hidden states, kept between rows of a seed and length."""

    model: Path
    sst2: Path
    unlabelled: Path
    size: Size

    def __post_init__(self) -> None:
        self.parts = lru_cache(1)(self._parts)

    def _parts(self, length: int, seed: int) -> dict[str, Any]:
        """The model and, by name, the texts."""
        tokenizer, model, size = load_pretrained(AutoTokenizer, self.model), tops.load(self.model, seed), self.size
        texts = {
            "train": tops.read_texts(self.sst2 / "train.tsv", tokenizer, length, size.train, seed),
            "public": tops.read_texts(self.sst2 / "dev.tsv", tokenizer, length, size.public, seed),
            "held_out": tops.read_texts(self.sst2 / "test.tsv", tokenizer, length, size.held_out, seed),
            "unlabelled": tops.read_public(self.unlabelled, tokenizer, length, size.unlabelled),
        }
        bottom, _ = split_model(model, size.frozen)
        parts = {name: Part(each, tops.hidden_states(bottom, each)) for name, each in texts.items()}
        return {"model": model, **parts}

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train and evaluate one setting."""
        parts = self.parts(row["length"], row["seed"])
        state = {name: value.clone() for name, value in parts["model"].state_dict().items()}
        torch.manual_seed(row["seed"])
        _, top = split_model(parts["model"], self.size.frozen)
        try:
            if row["form"] == "none":
                return self._without_noise(top, row)
            return self._at_a_pure_epsilon(top, row) if row["form"] == "pure" else self._with_noise(top, row)
        finally:
            # The top shares its weights with the model, which the next row starts from again.
            parts["model"].load_state_dict(state)
            parts["model"].requires_grad_(True)

    def _without_noise(self, top: torch.nn.Module, row: dict[str, Any]) -> dict[str, Any]:
        parts = self.parts(row["length"], row["seed"])
        self._train(top, parts["train"], row["seed"])
        held_out = parts["held_out"]
        return {"accuracy": tops.accuracy(top, held_out.states, held_out.texts)}

    def _at_a_pure_epsilon(self, top: torch.nn.Module, row: dict[str, Any]) -> dict[str, Any]:
        """What one code tells; first by public texts alone, then with what the private ones add."""
        parts = self.parts(row["length"], row["seed"])
        public, held_out, labelled = parts["public"], parts["held_out"], row["bottom"] == "public"
        if labelled:
            self._train(top, public, row["seed"])
        told = ewft.codebook(PURE[row["mechanism"]], row["epsilon"])
        settings = ewft.PureSettings(
            layer=row["layer"], mechanism=told, sequence_length=row["length"], dataset_size=self.size.train
        )
        private = settings.open(top)
        named = [batch | {"labels": own} for batch, own in zip(public.batches(), public.texts.labels.split(32))]
        private.learn(named, labels=labelled)
        before = tops.accuracy(top, held_out.states, held_out.texts)
        self._train(top, parts["train"], row["seed"], private)
        found = {"accuracy": tops.accuracy(top, held_out.states, held_out.texts), "true_epsilon": row["epsilon"]}
        private.remove()
        return {**found, "accuracy_by_public_text_alone": before if labelled else None}

    def _with_noise(self, top: torch.nn.Module, row: dict[str, Any]) -> dict[str, Any]:
        parts = self.parts(row["length"], row["seed"])
        noise = self._noise(row)
        autoencoder = row["autoencoder"] or None
        if row["bottom"] == "public":
            # Not by `ewft.rehearse`: here each epoch's own noise, and the loop that all three kinds of bottom share.
            levels = noise.ratios * (self.size.epochs if noise.reuse else 1)
            rehearsal = ewft.paper(levels, row["epsilon"], DELTA, "C")
            tuning = self._attach(top, rehearsal, row, autoencoder, len(parts["public"].texts.labels), trained=True)
            self._train(top, parts["public"], row["seed"], tuning)
            tuning.remove()
            autoencoder = tuning.autoencoder
            if autoencoder is not None:
                autoencoder.trained_on = "public"
        trained = row["bottom"] == "private"
        private = self._attach(top, noise, row, autoencoder, self.size.train, trained=trained)
        self._train(top, parts["train"], row["seed"], private)
        held_out = parts["held_out"]
        found: dict[str, Any] = {
            "accuracy": tops.accuracy(top, held_out.states, held_out.texts),
            "true_epsilon": noise.epsilon(),
            "noise_std_over_max_norm": list(noise.ratios),
        }
        private.remove()
        return found

    def _noise(self, row: dict[str, Any]) -> ewft.NoiseSchedule:
        return schedule(row["form"], row["epsilon"], row["step_distance"])

    def _attach(
        self,
        top: torch.nn.Module,
        noise: ewft.NoiseSchedule,
        row: dict[str, Any],
        autoencoder: Any,
        records: int,
        *,
        trained: bool,
    ) -> fastdp.EWFT:
        private = fastdp.EWFT(
            top,
            layer=row["layer"],
            noise=noise,
            sequence_length=row["length"],
            dataset_size=records,
            autoencoder=autoencoder,
            bottom="trained" if trained else "frozen",
            joint_autoencoder=trained,
        )
        if private.autoencoder is not None and private.autoencoder.trained_on is None:
            unlabelled = self.parts(row["length"], row["seed"])["unlabelled"]
            private.train_autoencoder(unlabelled.batches() * self.size.autoencoder_passes)
        return private

    def _train(self, top: torch.nn.Module, part: Part, seed: int, private: Any = None) -> None:
        tops.train_top(
            top,
            part.states,
            part.texts,
            size=self.size,
            seed=seed,
            extra=() if private is None else private.trained_parameters(),
            begin_epoch=None if private is None else private.set_epoch,
            ids=private is not None,
        )


def settings(size: Size, seeds: int) -> Iterator[dict[str, Any]]:
    """One row each, no setting twice; the first seed of everything comes first."""
    base: dict[str, Any] = {"layer": size.layer, "length": size.length, "epsilon": 8.0, "step_distance": 2.0}
    base |= {"autoencoder": [64], "mechanism": "EW-FT"}
    paper, sound = {"form": "paper", "bottom": "private"}, {"form": "sound", "bottom": "public"}
    once = {"form": "once", "bottom": "public", "mechanism": "release once"}
    rows: list[dict[str, Any]] = []
    # Table 3, lengths and layers; table 4, autoencoders; table 5, step distances; table 6, mechanisms; table 7, epsilons.
    rows += [{"layer": layer, **form} for layer in size.layers for form in (paper, once)]
    rows += [{"length": length, **form} for length in size.lengths for form in (paper, once)]
    rows += [{"autoencoder": sizes, **form} for sizes in ([4], [256], [256, 64, 4]) for form in (paper, once)]
    rows += [{"step_distance": distance, **paper} for distance in (1.0, 3.0, 4.0)]
    for layer in size.layers[1:]:
        for mechanism in MECHANISMS:
            sizes = [64] if mechanism == "EW-FT" else []
            rows.append({"layer": layer, "mechanism": mechanism, "autoencoder": sizes, **paper})
    for epsilon in (2.0, 4.0, 8.0):
        rows += [{"epsilon": epsilon, **form} for form in (paper, once)]
    rows += [{"epsilon": epsilon, "mechanism": "DP-Forward", "autoencoder": [], **sound} for epsilon in (8.0, 2.0, 4.0)]
    # What no epsilon that anybody prints would buy; and what the pretrained layers alone would, without public labels.
    rows += [{"epsilon": epsilon, **once} for epsilon in (100.0, 1000.0)]
    rows += [{"epsilon": epsilon, **once, "bottom": "pretrained"} for epsilon in (8.0, 1000.0)]
    pure = {"form": "pure", "bottom": "public", "autoencoder": []}
    for epsilon in (1.0, 2.0, 4.0, 8.0):
        rows.append({"epsilon": epsilon, **pure, "mechanism": "codebook 2"})
        rows.append({"epsilon": epsilon, **pure, "mechanism": "codebook 16", "bottom": "pretrained"})
    rows += [
        {"length": length, "form": "none", "bottom": "private", "mechanism": "non-private"} for length in size.lengths
    ]
    whole = [{**base, **row} for row in rows]
    # Rows of one length share hidden states.
    return suite.by_seed(sorted(whole, key=lambda row: row["length"]), seeds)


def plot(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Accuracy by layer, and the noise of each schedule."""
    with picture(folder / "ewft.png", 2, panel=(4.6, 7.6), legends=1) as (by_layer, noise):
        _plot_layers(rows, by_layer)
        _plot_noise(rows, noise)


def _plot_noise(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    drawn = set()
    for row in rows:
        ratios = tuple(row.get("noise_std_over_max_norm", ()))
        label = f"{row['mechanism']}, {row['form']}"
        if row["mechanism"] == "EW-FT":
            label += f", S={row['step_distance']:g}"
        if len(ratios) > 1 and row["epsilon"] == 8.0 and (label, ratios) not in drawn and "only" not in label:
            drawn.add((label, ratios))
            axes.plot(range(1, len(ratios) + 1), ratios, label=f"{label}: true {row['true_epsilon']:.1f}")
    axes.set(xlabel="epoch", ylabel="noise std / C", title="Schedules printed as epsilon 8,\nand their true epsilon")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _plot_layers(rows: Sequence[dict[str, Any]], axes: Any) -> None:
    length = min(row["length"] for row in rows)
    layers = sorted({row["layer"] for row in rows})
    shared: dict[str, Any] = {"epsilon": 8.0, "step_distance": 2.0, "length": length}
    for form, style, marker in (("paper", "-", "o"), ("sound", "--", "D")):
        for color, name in zip(("tab:green", "tab:blue"), MECHANISMS):
            sizes = [64] if name == "EW-FT" else []
            means = [
                suite.mean_of(rows, "accuracy", layer=layer, form=form, mechanism=name, autoencoder=sizes, **shared)
                for layer in layers
            ]
            if any(mean is not None for mean in means):
                axes.plot(layers, means, style, color=color, marker=marker, label=f"{name}, {form}")
    once = [
        suite.mean_of(rows, "accuracy", layer=layer, form="once", autoencoder=[64], bottom="public", **shared)
        for layer in layers
    ]
    axes.plot(layers, once, "-.", color="black", marker="s", label="released once")
    suite.level(axes, rows, "accuracy", "without noise", form="none", length=length)
    axes.set(xlabel="blocks before the noise", ylabel="accuracy", title="Accuracy at printed epsilon 8", xticks=layers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    sizes = {"default": Size(), "tiny": TINY, "full": FULL}
    parser = suite.parser_of(
        __doc__,
        sizes,
        model="folder of all-MiniLM-L6-v2 or another encoder",
        sst2="folder with train.tsv and test.tsv",
        public="plain text for the autoencoders",
    )
    parser.add_argument("--only", default="", help="only rows whose form and mechanism hold this")
    options, size, table = suite.begin(parser, arguments)
    bench = Bench(options.model, options.sst2, options.public, size)
    wanted = (row for row in settings(size, options.seeds) if options.only in f"{row['form']} {row['mechanism']}")
    suite.finish(table, suite.each(wanted, bench.run), options, plot)


if __name__ == "__main__":
    main()
