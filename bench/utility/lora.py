r"""Private LoRA at its best, on E2E references: each form at its own best learning rate, pairs of the same batches and noise.

    fastdp bench utility --suite lora --model MODEL --train train.csv --eval test.csv --json lora.json
    fastdp bench utility --suite lora --tuning full --forms warmed --column text --model MODEL --train train.txt --eval test.txt \
        --json full.json

Every row spends its ``epsilon`` truly (PLD). The protocol is one for all forms: three learning rates, and more while the best
is at the grid's edge, each once at the middle epsilon, on held-out texts and with a seed that nothing else uses; like
anybody's choice of them, that is not accounted for. A seed's forms share new weights, batches and noise, so that their
differences have a standard error of their own. Forms that are ``warmed`` make a pass over 64 public examples first; any method
may that is given some. Forms with ``oracle`` axes take them from the private gradients as they are: they have no epsilon and are
no method, but what no choice of axes can pass. Rows of the parts ``axes`` and ``promise`` say what axes should gain, by private
gradients as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastdp
from fastdp.data import Examples
from fastdp.finetune.evaluation import evaluate
from fastdp.integrations.adapters import fix_lora_projections
from fastdp.methods import rapft
from fastdp.private.method import Method

from ..plots import picture
from ..record import markdown
from . import rapft as suite_of_rapft, shaping, suite

DELTA = suite_of_rapft.DELTA
#: Learning rates by what is trained.
RATES = {"lora": (5e-3, 1e-2, 2e-2), "full": (2e-3, 4e-3, 8e-3)}
BASELINE = "DP-SGD"
#: Private ones that oracle axes are taken from.
EXAMPLES = 384


@dataclass(frozen=True)
class Form:
    """What is done to plain DP-SGD, on LoRA of rank 4 and scale 8 or on all weights.

    Args:
        fixed: the first matrix is frozen with orthonormal rows (`fix_lora_projections`).
        warmed: a pass over the public examples first.
        axes: gradients are clipped and noised along axes: of second moments of the ``public`` examples' gradients, batch by
            batch, or of ``singles``; or, without any privacy,
            ``oracle`` axes of the private ones', one a ``tensor``, or ``agreed``, the best there are for Adam (`shaping`).
        renewed: axes are made anew before every so many steps, at the weights as they are then.
        at_once: of so many public examples each time; None for all.
        chosen: how far these follow is chosen each time, by what a step promises.
        corrected: the noise's variance is subtracted from Adam's second moment.
        averaged: decay of an average of the weights, or None.
        denoised: singular values of the released gradients are shrunk to what the noise leaves of them.
        larger: so many times the batch in as many fewer steps.
    """

    fixed: bool = False
    warmed: bool = False
    axes: str | None = None
    renewed: int | None = None
    at_once: int | None = None
    chosen: bool = False
    corrected: bool = False
    averaged: float | None = None
    denoised: bool = False
    larger: int = 1

    @property
    def claims(self) -> bool:
        """Whether its epsilon is one."""
        return self.axes in (None, "public", "singles")

    @property
    def power(self) -> float | None:
        """How far axes follow what they are made of; None where that is chosen."""
        if self.chosen:
            return None
        return 1.0 if self.axes == "agreed" else 0.5


FORMS = {
    BASELINE: Form(),
    "first matrix fixed": Form(fixed=True),
    "warmed": Form(warmed=True),
    "warmed, axes": Form(warmed=True, axes="public"),
    "warmed, axes of single examples": Form(warmed=True, axes="singles"),
    "warmed, axes of single examples, renewed": Form(warmed=True, axes="singles", renewed=2),
    "warmed, axes of single examples, renewed from eight": Form(warmed=True, axes="singles", renewed=4, at_once=8),
    "warmed, axes of single examples, renewed and chosen": Form(warmed=True, axes="singles", renewed=2, chosen=True),
    "warmed, oracle axes": Form(warmed=True, axes="oracle"),
    "warmed, oracle axes by tensor": Form(warmed=True, axes="tensor"),
    "warmed, oracle axes of agreement": Form(warmed=True, axes="agreed"),
    "warmed, fixed": Form(warmed=True, fixed=True),
    "warmed, axes, corrected": Form(warmed=True, axes="public", corrected=True),
    "corrected": Form(corrected=True),
    "averaged": Form(averaged=0.7),
    "batches of twice the size": Form(larger=2),
    "denoised": Form(denoised=True),
}
#: What a form is compared with: the same public examples for both.
AGAINST = {name: "warmed" if form.warmed and name != "warmed" else BASELINE for name, form in FORMS.items()}


@dataclass(frozen=True)
class Size:
    """How much is run; ``tuned_on`` held-out texts choose the learning rates."""

    steps: int = 12
    batch_size: int = 64
    length: int = 48
    held_out: int = 160
    tuned_on: int = 96
    public: int = 64
    epsilons: tuple[float, ...] = (1.0, 3.0, 8.0)
    tuning: str = "lora"

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates that are tried first."""
        return RATES[self.tuning]

    @property
    def middle(self) -> float:
        """The epsilon at which learning rates are tried."""
        return self.epsilons[len(self.epsilons) // 2]


TINY = Size(2, 8, 32, 8, 8, 8, (5.0,))
FULL = Size(820, 256, 128, 4000, 600)


class Bench(suite_of_rapft.Bench):
    """The data, and one run of any row."""

    def __init__(
        self,
        model: Path,
        train: Path,
        held_out: Path,
        size: Size,
        column: str = "ref",
        public_rate: float | None = None,
    ):
        shared = suite_of_rapft.Size(
            steps=size.steps,
            batch_size=size.batch_size,
            length=size.length,
            held_out=size.held_out + size.tuned_on,
            public=size.public,
        )
        super().__init__(model, train, held_out, shared, column)
        self.tuning = size.tuning
        self.public_rate = public_rate or suite_of_rapft.LEARNING_RATES[size.tuning]
        #: The same for all forms of a seed.
        self.known = cache(self._known)
        self.middle = size.middle
        items: Any = self.held_out.items
        self.tuned_on = Examples(items[: size.tuned_on], 0)
        self.judged_on = Examples(items[size.tuned_on :], 0)

    def fresh(self, form: Form, seed: int) -> torch.nn.Module:
        """A fresh model with its trained parameters."""
        model = self.model(self.tuning, seed)
        if form.fixed:
            torch.manual_seed(seed)
            fix_lora_projections(model)
        if form.warmed:
            rapft.warm_up(model, self.public, self.public_rate)
        return model

    def start(self, form: Form, row: dict[str, Any]) -> fastdp.Private:
        """The private run of a row, not begun."""
        model = self.fresh(form, row["seed"])
        return suite.private_run(
            model,
            self.train,
            self.collator,
            self._method(form, model, row["seed"]),
            rate=row["learning_rate"],
            batch_size=self.size.batch_size * form.larger,
            steps=max(1, self.size.steps // form.larger),
            corrected=form.corrected,
            target_epsilon=row["epsilon"],
            target_delta=DELTA,
            max_physical_batch_size=32,
            # The same batches and noise for all forms of a seed; the data is public.
            unsafe_seed=row["seed"],
        )

    def run(self, row: dict[str, Any]) -> dict[str, Any]:
        """Train once and evaluate: perplexity, true epsilon, noise multiplier."""
        form = FORMS[row["form"]]
        run = self.start(form, row)
        shares: list[float] = []
        if form.denoised:
            run.optimizer.register_step_pre_hook(lambda *_: shares.append(denoise(run)))
        list(suite.train(run))
        examples = self.tuned_on if row["part"] == "rate" else self.judged_on
        if form.averaged is None:
            quality = evaluate(run.model, examples, self.collator, 32, "causal-lm")
        else:
            with run.averaged():
                quality = evaluate(run.model, examples, self.collator, 32, "causal-lm")
        found = {
            "perplexity": quality.perplexity,
            "true_epsilon": float(fastdp.accounting.epsilon(run.ledger.event(), DELTA)) if form.claims else "inf",
            "noise_multiplier": run.noise_multiplier,
            "trained_parameters": sum(p.numel() for p in run.parameters.values()),
        }
        if form.denoised:
            found["share_above_the_noise"] = sum(shares) / len(shares)
        run.detach()
        return found

    def _method(self, form: Form, model: torch.nn.Module, seed: int) -> Method:
        options: dict[str, Any] = {"bias_correction": form.corrected, "weight_averaging": form.averaged}
        if form.axes is None:
            return fastdp.DPSGD(**options)
        if form.renewed:
            source = rapft.PublicGradients(list(self._singles()), at_once=form.at_once)
            return fastdp.RapFT(source, allocation="axes", map_every=form.renewed, axes_power=form.power, **options)
        sizes = self._sizes(form, model, seed)
        return fastdp.RapFT(rapft.PublicMoments(sizes), allocation="axes", axes_power=form.power, **options)

    def _sizes(self, form: Form, model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
        """What the axes of a form follow, by trained parameter."""
        if form.axes in ("public", "singles"):
            return rapft.second_moments(model, self.public if form.axes == "public" else self._singles())
        sizes = {}
        for name, own in self.known(seed, 0)[0].items():
            root = own.square.sqrt()
            if form.axes == "tensor":
                root = torch.full_like(root, float(root.square().mean().sqrt()))
            elif form.axes == "agreed":
                # The share that examples have in common, of rank one; of chance as little as a twentieth.
                common, energy = (part.reshape(len(part), -1) for part in (own.mean.square(), own.square))
                whole = (common.sum() / energy.sum().clamp_min(1e-30)).clamp_min(0.05)
                rows, columns = ((common.sum(i) / energy.sum(i).clamp_min(1e-30)).clamp_min(0.05) for i in (1, 0))
                root = (whole / torch.outer(rows, columns)).view(root.shape)
            sizes[name] = root.float()
        return sizes

    def _singles(self) -> Iterator[dict[str, Any]]:
        """The public examples, each a batch."""
        return (
            {key: value[i : i + 1] for key, value in batch.items()}
            for batch in self.public
            for i in range(len(batch["labels"]))
        )

    def _known(self, seed: int, steps: int) -> tuple[dict[str, rapft.Moments], dict[str, rapft.Moments]]:
        """Of private gradients, and of public ones, after the public pass and so many private steps at the middle epsilon."""
        row = {"seed": seed, "epsilon": self.middle, "learning_rate": RATES[self.tuning][1]}
        run = self.start(FORMS["warmed"], row)
        loop = suite.train(run)
        while run.steps_done < steps or not (run.last_step_done or steps == 0):
            next(loop)
        run.detach()
        run.model.zero_grad(set_to_none=True)
        items: Any = self.train.items
        some = items[:: max(1, len(items) // EXAMPLES)][:EXAMPLES]
        private = rapft.gradient_moments(
            run.model, (suite.placed(self.collator([item])) for item in some), torch.float64
        )
        return private, rapft.gradient_moments(run.model, self._singles())

    def gain(self, row: dict[str, Any]) -> dict[str, Any]:
        """What a form's axes should do for a step of it, and the best axes for just that step (`shaping.less_noise`)."""
        form, seed = FORMS[row["form"]], row["seed"]
        found, _ = self.known(seed, row["steps"])
        ratio = self.size.batch_size / self.multiplier(row["epsilon"], False)
        assert form.power is not None
        own = rapft.rank_one(self._sizes(form, self.fresh(form, seed), seed), form.power)
        axes = {name: own[name].whole(known.mean.shape) for name, known in found.items()}
        return {
            "less_noise": shaping.less_noise(found, ratio, axes),
            "least_noise": shaping.less_noise(found, ratio),
        }

    def promise(self, row: dict[str, Any]) -> dict[str, Any]:
        """What axes by size promise for a step over what even ones do: by private gradients, and by the public ones alone.

        And with how much less noise even ones would do as well, by the private.
        """
        private, public = self.known(row["seed"], row["steps"])
        ratio = self.size.batch_size / self.multiplier(row["epsilon"], False)
        sizes = {name: own.square.sqrt() for name, own in public.items()}
        even, axes = (rapft.rank_one(sizes, power) for power in (0.0, row["power"]))
        whole = {name: axes[name].whole(known.mean.shape) for name, known in private.items()}
        return {
            **{
                name: rapft.promised(own, ratio, axes) / rapft.promised(own, ratio, even)
                for name, own in (("by_private", private), ("by_public", public))
            },
            "less_noise": shaping.less_noise(private, ratio, whole),
        }

    def cost(self, row: dict[str, Any]) -> dict[str, Any]:
        """Seconds of a DP-SGD step, of one along axes, and of making axes anew from the public examples, taking turns."""
        own = {"epsilon": self.middle, "learning_rate": RATES[self.tuning][0], **row}
        both = [self.start(FORMS[name], own) for name in ("warmed", "warmed, axes of single examples")]

        def step(run: fastdp.Private, loop: Iterator[int]) -> None:
            while next(loop) and not run.last_step_done:
                pass

        def make(count: int | None = None) -> None:
            rapft.fitted_axes(rapft.gradient_moments(model, itertools.islice(self._singles(), count)), 1.0)

        model = self.fresh(FORMS["warmed"], row["seed"])
        turns, steps = max(1, self.size.steps // 2), [partial(step, run, suite.train(run)) for run in both]
        calls: list[Any] = [*steps, make, partial(make, 8)]
        even, along, made, of_eight = suite.in_turns(calls, turns - turns // 3, turns // 3)
        for run in both:
            run.detach()
        seconds = statistics.median(even)
        return {
            "step_seconds": seconds,
            "step_along_axes": statistics.median(a / b for a, b in zip(along, even)),
            "axes_seconds": statistics.median(made),
            "axes_over_step": statistics.median(made) / seconds,
            "axes_of_eight_over_step": statistics.median(of_eight) / seconds,
        }


@torch.no_grad()
def denoise(run: fastdp.Private) -> float:
    """Shrink the singular values of the released gradients of matrices; the share of them that any noise left visible.

    Of an m x n matrix with noise of variance v a singular value y below (sqrt(m) + sqrt(n)) sqrt(v) says nothing; above, the
    least Frobenius error is at sqrt((y^2 - (m + n) v)^2 - 4 m n v^2) / y (Gavish and Donoho 2017).
    """
    std = run.policy.stds[0] / run.expected_batch_size
    kept = every = 0
    for parameter in run.parameters.values():
        if parameter.grad is None or parameter.dim() != 2:
            continue
        left, values, right = torch.linalg.svd(parameter.grad, full_matrices=False)
        (m, n), v = parameter.shape, std**2
        seen = values > (m**0.5 + n**0.5) * std
        rest = ((values**2 - (m + n) * v) ** 2 - 4 * m * n * v**2).clamp_min(0).sqrt() / values
        parameter.grad.copy_((left * torch.where(seen, rest, torch.zeros_like(rest))) @ right)
        kept, every = kept + int(seen.sum()), every + len(values)
    return kept / every


def settings(size: Size, seeds: int, rates: Mapping[str, float] | None = None) -> Iterator[dict[str, Any]]:
    """The rows of perplexity; the middle epsilon of every form and seed comes first."""
    known = dict.fromkeys(FORMS, size.rates[1]) if rates is None else rates
    for epsilon in sorted(size.epsilons, key=lambda epsilon: epsilon != size.middle):
        rows = [
            {"part": "perplexity", "form": form, "epsilon": epsilon, "learning_rate": known[form]} for form in known
        ]
        yield from suite.by_seed(rows, seeds)


def runs(bench: Bench, size: Size, table: suite.Table, seeds: int, forms: Sequence[str]) -> Iterator[suite.Run]:
    """Learning rates first, then the rows at the best of them."""
    for form in forms:

        def at(rate: float, form: str = form) -> suite.Run:
            row = {"part": "rate", "form": form, "epsilon": size.middle, "learning_rate": rate, "seed": seeds}
            return row, partial(bench.run, row)

        yield from suite.interior(table, size.rates, at, "perplexity", largest=False)
    shaped = [
        {"part": "axes", "form": form, "epsilon": size.middle, "steps": steps}
        for form in forms
        for steps in (0, size.steps // 2)
        if FORMS[form].axes and not (FORMS[form].corrected or FORMS[form].renewed)
    ]
    yield from suite.each(suite.by_seed(shaped, seeds), bench.gain)
    if any(FORMS[form].chosen for form in forms):
        asked = [
            {"part": "promise", "epsilon": epsilon, "steps": steps, "power": power}
            for steps in (0, size.steps // 2, size.steps - 1)
            for epsilon in size.epsilons
            for power in (0.125, 0.25, 0.5)
        ]
        yield from suite.each(suite.by_seed(asked, min(2, seeds)), bench.promise)
        yield from suite.each(suite.by_seed([{"part": "cost"}], 1), bench.cost)
    yield from suite.each(settings(size, seeds, {form: best_rate(table.rows, form, size) for form in forms}), bench.run)


def best_rate(rows: Sequence[dict[str, Any]], form: str, size: Size) -> float:
    """The learning rate that did best among those tried; the middle of the grid if none was."""
    tried = [row for row in rows if row["part"] == "rate" and row["form"] == form]
    return min(tried, key=lambda row: row["perplexity"])["learning_rate"] if tried else size.rates[1]


def tables(rows: Sequence[dict[str, Any]], size: Size) -> str:
    """Markdown: perplexity by epsilon, and what a form has over the one that it is compared with, by pairs of seeds."""
    lines = []
    for form in FORMS:
        cells = []
        for epsilon in size.epsilons:
            setting: dict[str, Any] = {"part": "perplexity", "epsilon": epsilon}
            ahead = suite.paired(rows, "perplexity", {**setting, "form": form}, {**setting, "form": AGAINST[form]})
            cell = suite.told(rows, "perplexity", **setting, form=form)
            if ahead is not None and AGAINST[form] != form:
                cell += f", {ahead[0]:+.1f} (standard error {ahead[1]:.1f}, {ahead[2]} pairs)"
            cells.append(cell)
        if any(cell != "-" for cell in cells):
            lines.append([form, f"{best_rate(rows, form, size):g}", *cells])
    head = ["form", "learning rate", *(f"epsilon {e:g}, less its baseline" for e in size.epsilons)]
    return "\n".join(markdown(head, lines)) + "\n"


def plot(rows: Sequence[dict[str, Any]], folder: Path, size: Size) -> None:
    """Perplexity against epsilon."""
    with picture(folder / "lora-epsilon.png", panel=(6.8, 5.2), legends=5) as (axes,):
        for form in FORMS:
            suite.curve(axes, rows, "perplexity", "epsilon", size.epsilons, form, part="perplexity", form=form)
        suite.by_epsilon(axes, size.epsilons, "perplexity")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, then draw."""
    parser = suite.parser_of(
        __doc__,
        {"default": Size(), "tiny": TINY, "full": FULL},
        seeds=5,
        model="folder of a small GPT-2",
        train="file of rows with texts",
        eval="file of the same form, held out",
    )
    parser.add_argument("--column", default="ref", help="of the texts")
    parser.add_argument("--tuning", choices=tuple(RATES), default="lora", help="what is trained")
    parser.add_argument("--public-rate", type=float, help="learning rate of the pass over public examples")
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=tuple(FORMS), help="only these")
    options, size, table = suite.begin(parser, arguments)
    size = dataclasses.replace(size, tuning=options.tuning)
    bench = Bench(options.model, options.train, options.eval, size, options.column, options.public_rate)
    wanted = runs(bench, size, table, options.seeds, options.forms)
    suite.finish(table, wanted, options, partial(plot, size=size), partial(tables, size=size))


if __name__ == "__main__":
    main()
