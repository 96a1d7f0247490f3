"""EW-FT and DP-Forward: what is released of a model's hidden state, the count of it, and its card."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastdp.accounting as accounting
import fastdp.ops as ops
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.ledger import STEP
from fastdp.accounting.statements import LOCAL_GUARANTEE, ONE_SEQUENCE, UNSAMPLED
from fastdp.methods.blocks import Layer, layer_name
from fastdp.methods.ewft.autoencoder import StackedAutoencoder, train_autoencoder
from fastdp.methods.ewft.hooks import LayerReleases, NoisePlace
from fastdp.methods.ewft.noise import NoiseSchedule
from fastdp.methods.ewft.records import EVALUATE, Records
from fastdp.methods.public import PublicText, describe_origin
from fastdp.ops.grid import DISTANCE
from fastdp.validate import instance, one_of, positive

_UNCHECKED = (
    "each record was used at most once an epoch: nobody checked, since the run was allowed to go without example_ids"
)
_TRAINED_BOTTOM = (
    "the layers before the perturbation are trained on sequences without noise: whoever sees them, or an update of them, "
    "learns about the sequences in a way that the noise does not cover"
)
_JOINT_AUTOENCODER = "the autoencoder is trained together with the model, on sequences without noise, and then shared"


@dataclass(frozen=True, kw_only=True)
class EWFTSettings(NoisePlace):
    """Settings of `EWFT`, all public; those of `NoisePlace`, and:

    Args:
        noise: a `NoiseSchedule`, such as ``ewft.release_once(epsilon, delta)`` or ``ewft.dp_forward(...)``.
        max_norm: C.
        autoencoder: sizes of its layers down to the code, such as ``(64,)`` or ``(256, 64, 4)``; a `StackedAutoencoder`
            of the model's width; or None for none (DP-Forward).
        bottom: ``frozen`` turns off the gradients of all that precedes the layer, tied weights included; ``trained`` leaves
            them, and the autoencoder's, as the paper does. That voids the guarantee, and the card says so.
        unchecked_records: train without ``example_ids``, if the loader surely uses each record once an epoch. Only the
            number of rows is looked at then, and the card states the assumption.
        secure_rounding: as in `fastdp.ops.clip_noise`.
    """

    noise: NoiseSchedule
    max_norm: float = 1.0
    autoencoder: Sequence[int] | StackedAutoencoder | None = (64,)
    bottom: str = "frozen"
    unchecked_records: bool = False
    secure_rounding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        instance(NoiseSchedule, "a NoiseSchedule, such as ewft.release_once(epsilon, delta)", noise=self.noise)
        positive(max_norm=self.max_norm)
        one_of(("frozen", "trained"), bottom=self.bottom)
        if self.unchecked_records and self.noise.reuse:
            raise ValueError(
                "a schedule that releases once finds its releases by example_ids: leave unchecked_records out"
            )

    def open(self, model: nn.Module, /, **where: Any) -> EWFT:
        """The perturbation of a model; ``where`` holds EWFT's ``output_dir``, ``resume`` and ``unsafe_seed``."""
        return EWFT(model, **vars(self), **where)

    @property
    def exposed(self) -> bool:
        """Whether gradients reach what precedes the noise."""
        return self.bottom == "trained"

    def flaws(self) -> list[str]:
        """Why runs with these settings carry no guarantee; empty if they do."""
        joint = (_JOINT_AUTOENCODER,) if self.autoencoder is not None else ()
        return [*self.noise.flaws, *((_TRAINED_BOTTOM, *joint) if self.exposed else ())]

    def ledger(self, output_dir: str | os.PathLike[str] | None, resume: bool) -> accounting.Ledger:
        """The ledger in a folder, or in memory: one release of every record for each level of noise, by `kind`."""
        header: dict[str, Any] = {
            "mechanism": self.noise.name,
            "dataset_size": self.dataset_size,
            "unit": "one user's sequence",
            "adjacency": "replace_one",
            "sampling": UNSAMPLED,
            "noise_std_over_max_norm": list(self.noise.ratios),
            "noise_multiplier": self.noise.ratios[-1],
            "sequence_length": self.sequence_length,
            "reuse": self.noise.reuse,
            "layer": self.layer,
            "max_norm": float(self.max_norm),
            "unchecked_records": self.unchecked_records,
            "flaws": self.flaws(),
        }
        first, *later = (accounting.EventModel(accounting.gaussian(ratio)) for ratio in self.noise.ratios)
        return accounting.Ledger.open_or_create(
            None if output_dir is None else Path(output_dir) / "ledger.jsonl",
            header,
            event=first,
            budget_steps=1,
            side={kind(epoch): (model, 1) for epoch, model in enumerate(later, start=2)},
            resume=resume,
        )


def kind(epoch: int) -> str:
    """What the ledger calls the release of every record in an epoch."""
    return STEP if epoch == 1 else f"epoch {epoch}"


class EWFT(LayerReleases):
    """Perturbs the hidden state after one layer of a model, in training and in inference, until `remove`.

    At the layer, the hidden state h [B, T, d] becomes ``decode(clip(encode(h)) + noise)``: each example's whole padded
    sequence is clipped to Frobenius norm C and gets i.i.d. Gaussian noise of std ``C * ratio`` (section 5.3 of the paper). What
    precedes belongs to the user, what follows sees the noisy codes alone.

    The model's own forward pass runs, with hooks, so that it saves and loads as ever. The autoencoder is not part of it: pass
    `trained_parameters` to the optimizer to train its decoder too, and keep `state_dict` beside the model. A saved model
    without its EWFT perturbs nothing.

    A forward pass in training mode, with gradients on, or with ``example_ids`` releases the records of its batch. `set_epoch`
    says which noise applies, and ``example_ids`` [B], from 0 to N - 1 among the model's inputs, which records they are: one that
    comes a second time in an epoch is refused. In any other pass, as in evaluation mode under ``torch.no_grad()``, every row is
    a release of its own at the noise of the last epoch. ``inference_releases`` counts them.

    Args:
        model: of any architecture, with any head; PEFT wrappers may be around it. What precedes the layer is frozen.
        layer: as in `EWFTSettings`, or the module itself. In an architecture that `fastdp.methods.blocks` does not know, it
            is a module, and needs ``lengths="public"``.
        noise, sequence_length, dataset_size, max_norm, autoencoder, bottom, lengths, unchecked_records, secure_rounding,
            public_texts: as in `EWFTSettings`.
        output_dir: where the ledger is kept; None keeps it in memory.
        resume: go on with the ledger in ``output_dir``, with the same arguments.
        unsafe_seed: noise that whoever knows the seed can repeat: for tests, and the card says so.

    Raises ValueError for a layer that does not exist, an autoencoder of another width, values out of range, and a model that
    has an EWFT already. Also for a ledger in ``output_dir`` that is not to be resumed, or not by these arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: Layer,
        noise: NoiseSchedule,
        sequence_length: int,
        dataset_size: int,
        max_norm: float = 1.0,
        autoencoder: Sequence[int] | StackedAutoencoder | None = (64,),
        bottom: str = "frozen",
        lengths: str = "hidden",
        unchecked_records: bool = False,
        secure_rounding: bool = True,
        public_texts: Sequence[PublicText] = (),
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        unsafe_seed: int | None = None,
    ):
        self.settings = EWFTSettings(
            layer=layer_name(model, layer),
            noise=noise,
            sequence_length=sequence_length,
            dataset_size=dataset_size,
            max_norm=max_norm,
            autoencoder=autoencoder,
            bottom=bottom,
            lengths=lengths,
            unchecked_records=unchecked_records,
            secure_rounding=secure_rounding,
            public_texts=public_texts,
        )
        super().__init__(model, self.settings, unsafe_seed)
        self.noise, self.noise_multiplier = noise, noise.ratios[-1]
        self.autoencoder = self._autoencoder()
        self.ledger = self.settings.ledger(output_dir, resume)
        self.epoch: int | None = None
        self._records = Records(self.settings.dataset_size, self.settings.unchecked_records)
        #: Whether the releases were read back from a state: a record that is not among them costs a further release of all.
        self._sealed = False
        #: Numbers that are released of a sequence.
        self._numbers = 0
        if self.autoencoder is not None:
            self.autoencoder.encoder.requires_grad_(self.settings.exposed)
        self.attach(freeze=not self.settings.exposed)

    def _autoencoder(self) -> StackedAutoencoder | None:
        made = self.settings.autoencoder
        if made is None:
            return None
        if not isinstance(made, StackedAutoencoder):
            made = StackedAutoencoder(self.blocks.hidden_size, made)
        if self.blocks.known and made.width != self.blocks.hidden_size:
            raise ValueError(
                f"the autoencoder takes states of width {made.width}, but this model's are {self.blocks.hidden_size} wide"
            )
        return made.to(next(self.blocks.base.parameters()).device)

    def set_epoch(self, epoch: int) -> None:
        """The noise of this epoch, counted from 1, applies from now on. Call it before the epoch's first batch.

        Entering an epoch is recorded as a release of every record, before any is made.

        Raises:
            ValueError: for an epoch beyond the schedule's last.
            RuntimeError: for one before the present one.
            BudgetExceeded: for an interrupted one: go on with the next, or pay for it with `allow_again`.
        """
        epochs = self.noise.epochs
        if not 1 <= epoch <= (epochs or epoch):
            raise ValueError(f"epoch is {epoch}: this schedule has epochs 1 to {epochs or 'any number'}")
        if epoch == self.epoch:
            return
        if self.epoch is not None and epoch < self.epoch:
            raise RuntimeError(f"epoch {epoch} comes after epoch {self.epoch}: its records were released already")
        if not (self.noise.reuse and self.epoch is not None):
            self._record(1 if self.noise.reuse else epoch)
            self._records = Records(self.settings.dataset_size, self.settings.unchecked_records)
        self.epoch = epoch

    def _record(self, epoch: int) -> None:
        if self.ledger.remaining(kind(epoch)) == 0:
            raise accounting.BudgetExceeded(
                f"Records of epoch {epoch} were released already, or may have been. Go on with the next epoch, "
                f"or call allow_again({epoch}) and pay again."
            )
        self.ledger.record(kind(epoch))

    def allow_again(self, epoch: int) -> None:
        """Allow one more release of every record at an epoch's noise; it is accounted like any other."""
        self.ledger.extend(self.ledger.budget(kind(epoch)) + 1, kind(epoch))
        if not self._sealed:
            self.epoch = None

    def trained_parameters(self) -> list[nn.Parameter]:
        """Parameters of the autoencoder that may be trained with the model: its decoder's, which see noisy codes alone."""
        return [] if self.autoencoder is None else [p for p in self.autoencoder.parameters() if p.requires_grad]

    def hidden_states(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
        """Hidden states [B, T, d] at the layer, without noise, of **public** batches of model inputs."""
        for batch in batches:
            yield self.read_layer(batch, "hidden")

    def train_autoencoder(
        self, public_batches: Iterable[Mapping[str, Any]], *, learning_rate: float = 1e-3
    ) -> list[float]:
        """Train the autoencoder, one step a **public** batch, on codes clipped and noised as they will be; returns the losses."""
        if self.autoencoder is None:
            raise ValueError("there is no autoencoder to train: give its sizes")
        self.autoencoder.requires_grad_(True)
        try:
            return train_autoencoder(
                self.autoencoder,
                self.hidden_states(public_batches),
                learning_rate=learning_rate,
                max_norm=self.settings.max_norm,
                std=self.noise.ratios[-1] * self.settings.max_norm,
                stream=self.stream,
            )
        finally:
            self.autoencoder.encoder.requires_grad_(self.settings.exposed)

    def remove(self) -> None:
        """Take the hooks out, so that the model computes as before, and close the ledger. Frozen parameters stay so."""
        super().remove()
        self.ledger.close()

    def discard(self) -> None:
        """`remove`, and take a ledger away in which no epoch has begun, with its folder if that holds nothing else."""
        self.remove()
        path = self.ledger.path
        if self.untouched and path is not None and path.exists():
            path.unlink()
            if not any(path.parent.iterdir()):
                path.parent.rmdir()

    def release(self, hidden: Tensor, mask: Tensor | None, ids: Tensor | None) -> Tensor:
        ae = self.autoencoder
        if ae is not None and ae.trained_on != "public" and not self.settings.exposed:
            raise RuntimeError(
                "The autoencoder has not been trained. Call train_autoencoder with public text, or set "
                "trained_on to 'public' if it learned from such text."
            )
        with torch.set_grad_enabled(self.settings.exposed and torch.is_grad_enabled()):
            code = hidden if ae is None else ae.encode(hidden)
            # Padding carries nothing: left in, it would use up the norm that the clip allows.
            return self._released(code if mask is None else code * mask[:, :, None].to(code.dtype), ids)

    def decode(self, code: Tensor) -> Tensor:
        return code if self.autoencoder is None else self.autoencoder.decode(code)

    def _released(self, code: Tensor, ids: Tensor | None) -> Tensor:
        if not self.training:
            self.inference_releases += code.shape[0]
            return self._noised(code, self.noise.ratios[-1])
        if self.epoch is None:
            raise RuntimeError(
                "no epoch has begun: call set_epoch(1) before the first batch, or give Trainer an EpochCallback; "
                + EVALUATE
            )
        if self.noise.reuse:
            return self._records.reused(code, ids, self._first)
        self._records.count(code.shape[0], ids, self.epoch)
        return self._noised(code, self.noise.ratios[self.epoch - 1])

    def _first(self, code: Tensor) -> Tensor:
        """Releases of records that have none yet."""
        if self._sealed:
            self._record(1)
            self._sealed = False
        return self._noised(code, self.noise.ratios[0])

    def _noised(self, code: Tensor, ratio: float) -> Tensor:
        std = ratio * self.settings.max_norm
        self._numbers = code[0].numel() if len(code) else self._numbers
        return ops.clip_noise(
            code, self.settings.max_norm, std, self.stream, secure_rounding=self.settings.secure_rounding
        )

    def event(self) -> DpEvent:
        """Event of the releases of one training record so far; sensitivity 2 C."""
        return self.ledger.event()

    def flaws(self) -> list[str]:
        return self.settings.flaws() + super().flaws()

    def epsilon(self, delta: float | None = None) -> float:
        """What a training record's releases cost so far, without amplification; inf of noise that can be known."""
        if self.untouched:
            return 0.0
        if 0.0 in self.noise.ratios or self.stream.reproducible:
            return math.inf
        return accounting.epsilon(self.event(), self.noise.delta if delta is None else delta, adjacency="replace_one")

    def inference_epsilon(self, queries: int = 1, delta: float | None = None) -> float:
        """What a sequence costs that was sent ``queries`` times in inference; every query is a fresh release."""
        ratio = self.noise.ratios[-1]
        if ratio == 0 or self.stream.reproducible:
            return math.inf
        event = accounting.EventModel(accounting.gaussian(ratio)).event(queries)
        return accounting.epsilon(event, self.noise.delta if delta is None else delta, adjacency="replace_one")

    def claim(self) -> accounting.Gaussian:
        noise = self.noise
        return accounting.Gaussian(
            "one user's sequence", "replace_one", self.event(), noise.delta, noise.target_epsilon
        )

    def figure(self) -> str:
        return f"epsilon {self.epsilon():.3f} at delta {self.noise.delta:g} for one user's sequence (local)"

    @property
    def untouched(self) -> bool:
        return self.ledger.untouched

    def card(self) -> accounting.Card:
        """What was released about a training record, its cost without amplification, and what is not protected."""
        noise, ae = self.noise, self.autoencoder
        query = "infinite" if math.isinf(asked := self.inference_epsilon()) else f"{asked:.3f}"
        spent = sum(self.ledger.spent(name) for name in self.ledger.kinds)
        return accounting.Card.build(
            mechanism={
                "name": noise.name,
                "layer": self.settings.layer,
                "sequence_length": self.settings.sequence_length,
                "max_norm": self.settings.max_norm,
                "noise_std_over_max_norm": list(noise.ratios),
                "reuse": noise.reuse,
                "autoencoder": None if ae is None else [ae.width, *ae.sizes],
                "autoencoder_trained_on": None if ae is None else ae.trained_on,
                "public_text": [text.describe() for text in self.settings.public_texts] or describe_origin(None),
                **dict(noise.settings),
            },
            unit=ONE_SEQUENCE,
            adjacency="replace_one",
            sampling=UNSAMPLED,
            dataset_size=self.settings.dataset_size,
            noise_multiplier=noise.ratios[-1],
            event=self.event(),
            delta=noise.delta,
            target_epsilon=noise.target_epsilon,
            planned_steps=sum(self.ledger.budget(name) for name in self.ledger.kinds),
            spent_steps=spent,
            run_id=self.ledger.run_id,
            ledger_head=self.ledger.head,
            noise_source=accounting.noise_source(
                self.stream.reproducible, self.settings.secure_rounding, self.stream.rounds
            ),
            model=self.described() | {"bottom": self.settings.bottom},
            flaws=self.flaws(),
            remaining=[accounting.rounded_to_grid(DISTANCE * self._numbers * spent)]
            if self.settings.secure_rounding
            else [],
            assumptions=(*((_UNCHECKED,) if self.settings.unchecked_records else ()), *self.assumptions()),
            notes=(
                f"{LOCAL_GUARANTEE}the perturbed sequences",
                f"each inference query is a further release of epsilon {query} about the "
                f"sequence in it; {self.inference_releases} were made",
            ),
            unprotected=self.unprotected(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Autoencoder, epoch, counts and the releases that are reused. They hold noisy codes, and no key."""
        return {
            "autoencoder": None if self.autoencoder is None else self.autoencoder.state_dict(),
            "epoch": self.epoch,
            "seen": None if self.epoch is None else self._records.seen,
            "codes": self._records.codes,
            "inference_releases": self.inference_releases,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave: kept releases are used again instead of new ones.

        What was released after the state was kept is not known, so an epoch that was interrupted does not go on: set the
        next one, or `allow_again`. A record whose release is not among the kept ones is refused likewise.
        """
        if (state["autoencoder"] is None) != (self.autoencoder is None):
            raise ValueError("this state was kept with another autoencoder, or none")
        if state["seen"] is not None and len(state["seen"]) != self.settings.dataset_size:
            raise ValueError(f"this state is of {len(state['seen'])} records, not {self.settings.dataset_size}")
        if self.autoencoder is not None:
            self.autoencoder.load_state_dict(state["autoencoder"])
        self.inference_releases = max(self.inference_releases, state["inference_releases"])
        epoch = state["epoch"]
        for begun in range(1, (1 if self.noise.reuse else epoch) + 1 if epoch else 1):
            # A ledger that was begun anew does not know of them.
            if self.ledger.spent(kind(begun)) == 0:
                self.ledger.record(kind(begun))
        if self.noise.reuse:
            self.epoch, self._sealed = epoch, epoch is not None
            if state["seen"] is not None:
                self._records.seen, self._records.codes = state["seen"], state["codes"]
