"""Contributing tokens (CTI) from the command line: which texts are counted, and what the counts cost."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fastdp.commands.flags import with_flags
from fastdp.commands.refusal import console

if TYPE_CHECKING:
    from fastdp import TextPrivatizer
    from fastdp.methods.public import PublicText
    from fastdp.methods.sap import CTI
    from fastdp.methods.sap.privatizer import Displacement


@dataclass(frozen=True)
class Contributing:
    """The options of contributing tokens, and the epsilon of one form, as a command has them."""

    cti: Annotated[
        Literal["prior", "quotient", "paper"] | None,
        typer.Option(help="favour tokens that tell classes apart, in this form; paper guarantees nothing"),
    ] = None
    cti_public: Annotated[
        Path | None, typer.Option(help="public labelled texts to count tokens in, with the same columns")
    ] = None
    cti_noise: Annotated[
        float | None, typer.Option(help="count the private texts, with normal noise of this multiplier")
    ] = None
    cti_delta: Annotated[float, typer.Option(help="delta of the epsilon that is stated for noised counts")] = 1e-5
    cells: Annotated[int | None, typer.Option(help="--cti quotient: number of cells of the vocabulary (5)", min=2)] = (
        None
    )
    public_overlap: Annotated[
        int, typer.Option(help="records that --cti-public may share with IN: confirmed to be public", min=0)
    ] = 0
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="--cti quotient: epsilon of one token, in place of --eta; a text costs the sum over its tokens"
        ),
    ] = None

    def validated(self, eta: float | None) -> Contributing | None:
        """These options, or None without --cti. Raises ValueError, before anything is read, where they do not go together."""
        if self.cti == "quotient" and (self.epsilon is None or eta is not None):
            raise ValueError("--cti quotient guarantees an epsilon of any token: give --epsilon, and leave --eta out")
        if self.cti != "quotient" and self.epsilon is not None:
            raise ValueError("--epsilon of a token belongs to --cti quotient: give --eta, in units of 1 / distance")
        if self.cells is not None and self.cti != "quotient":
            raise ValueError("--cells belongs to --cti quotient: leave it out, or name that form")
        if self.cti is None:
            if self.cti_public is not None or self.cti_noise is not None:
                raise ValueError("--cti-public and --cti-noise say what --cti counts: name its form")
            return None
        if self.cti_public is not None and self.cti_noise is not None:
            raise ValueError("counts of public texts need no noise: give either --cti-public or --cti-noise")
        if self.cti_public is None and self.cti_noise is None and self.cti != "paper":
            raise ValueError(
                "counts of the private texts reveal them: name public texts with --cti-public, or add noise "
                "with --cti-noise (--cti paper guarantees nothing)."
            )
        return self

    def admit(self, texts: Sequence[str], private: Mapping[Path, Sequence[str]]) -> PublicText | None:
        """What the statement says of the public texts, if there are any, compared with the private ones by file."""
        from fastdp.public import PublicGate

        if self.cti_public is None:
            return None
        gate = PublicGate([text for own in private.values() for text in own], list(private), self.public_overlap)
        return gate.admit(self.cti_public, texts)

    def count(
        self,
        tokenizer: Any,
        vocabulary: int,
        texts: Sequence[str],
        labels: Sequence[int],
        classes: int,
        origin: PublicText | None = None,
    ) -> CTI:
        """Counts of the public or the private texts, as it was asked for."""
        from fastdp.methods.encoding import encode_private
        from fastdp.methods.sap import CTI

        return CTI.from_texts(
            encode_private(tokenizer, texts)["input_ids"],
            labels,
            classes=classes,
            vocabulary=vocabulary,
            public=self.cti_public is not None,
            form=str(self.cti),
            noise_multiplier=self.cti_noise,
            delta=self.cti_delta,
            origin=origin,
            cells=self.cells,
        )

    def load_counts(self, path: Path) -> CTI | None:
        """Counts of private texts from an earlier call, which are not drawn again; None if there are none."""
        import fastdp.accounting as accounting
        from fastdp.methods.sap import CTI
        from fastdp.methods.sap.cti import CELLS

        if not path.exists():
            return None
        found = CTI.load(path)
        source = "private" if self.cti_noise is None else accounting.gaussian(self.cti_noise)
        cells = (self.cells or CELLS) if self.cti == "quotient" else None
        if (found.form, found.source, found.describe()["cells"]) != (self.cti, source, cells):
            raise ValueError(
                f"{path} holds counts that were made with another --cti, --cti-noise or --cells. Use those, or "
                "another folder, and pay for counting again."
            )
        return replace(found, delta=self.cti_delta)


#: Gives a command these options, as an argument named `counting`.
with_contributing = with_flags(
    list(inspect.signature(Contributing, eval_str=True).parameters.values()), "counting", Contributing
)


def show_contributing(cti: CTI) -> None:
    """One line: how many tokens may be favoured, and what is known of the texts that were counted."""
    cost = cti.epsilon_of_counts()
    counts = (
        "public counts" if cti.source == "public" else f"counts at epsilon {cost:.4g} and delta {cti.delta:g} a text"
    )
    if cti.flaws():
        counts = f"no guarantee: {'; '.join(cti.flaws())}"
    supported = int(cti.supported.sum())
    console.print(f"cti {cti.form}: {supported:,} tokens occur often enough to be favoured; {counts}")


def show_displacement(privatizer: TextPrivatizer) -> Displacement:
    """One line: what it leaves in the clear."""
    shown = privatizer.displacement()
    console.print(
        f"{privatizer.in_short}: {shown.unchanged:.1%} of the vocabulary's tokens stay what they were, "
        f"mean displacement {shown.mean_displacement:.4g}"
    )
    return shown
