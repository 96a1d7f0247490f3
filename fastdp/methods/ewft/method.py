"""EW-FT and DP-Forward: a perturbation of a stock model's hidden state, and the count of what it released."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import fastdp.accounting as accounting
import fastdp.ops as ops
from fastdp.accounting.event_types import DpEvent
from fastdp.accounting.ledger import STEP
from fastdp.methods.blocks import Blocks, find_blocks
from fastdp.methods.ewft.autoencoder import StackedAutoencoder, TrainedPrivately, train_autoencoder
from fastdp.methods.ewft.mask import argument, hide_padding
from fastdp.methods.ewft.noise import NoiseSchedule
from fastdp.methods.public import PublicText, described
from fastdp.ops.stream import NoiseStream

if TYPE_CHECKING:
    from transformers import TrainerCallback

_TRAINED_BOTTOM = (
    "the layers before the perturbation are trained on sequences without noise: whoever sees them, or an update of them, "
    "learns about the sequences in a way that the noise does not cover"
)
_JOINT_AUTOENCODER = "the autoencoder is trained together with the model, on sequences without noise, and then shared"
_TOKEN_LABELS = (
    "labels were given for every token: where they are the text itself, training on them reveals what the noise hides"
)
_UNCHECKED = (
    "each record was used at most once an epoch: nobody checked, since the run was allowed to go without example_ids"
)
_UNPROTECTED = (
    "labels: the guarantee covers a sequence, not the label that comes with it",
    "which sequence belongs to whom, and when it is used",
)


class _Reached(Exception):
    """Ends a forward pass at the perturbed layer; carries the hidden state there, or its noisy code."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


class EWFT:
    """Perturbs the hidden state after one layer of a model, in training and in inference, until `remove`.

    At the layer, the hidden state h [B, T, d] becomes ``decode(clip(encode(h)) + noise)``: each example's whole padded
    sequence is clipped to Frobenius norm C and gets i.i.d. Gaussian noise of std ``C * ratio`` (Zhang et al., Sci China Inf
    Sci 69, 142106, section 5.3). What precedes belongs to the user, what follows sees the noisy codes alone.

    The model's own forward pass runs, with hooks: its modules, parameters and state-dict keys do not change, so that it
    saves and loads as ever. The autoencoder is not part of the model: pass `trained_parameters` to the optimizer to train
    its decoder too, and keep `state_dict` beside the model. A saved model without its EWFT perturbs nothing.

    Args:
        model: of the BERT, RoBERTa, GPT-2 or Llama family, with any head; PEFT wrappers may be around it.
        layer: ``embeddings`` (0), the number of a block counted from 1, or ``output``.
        noise: a `NoiseSchedule`, such as ``ewft.release_once(epsilon, delta)`` or ``ewft.epoch_weighted(...)``.
        sequence_length: tokens of every padded sequence. Batches of another length are refused: a length that follows the
            text gives it away.
        dataset_size: records in the training data, N; public.
        max_norm: C.
        autoencoder: sizes of its layers down to the code, such as ``(64,)`` or ``(256, 64, 4)``; a `StackedAutoencoder`
            of the model's width; or None for none (DP-Forward).
        bottom: ``frozen`` turns off the gradients of all that precedes the layer, tied weights included (see
            ``frozen_parameters``); ``trained`` leaves them, which voids the guarantee, and the card says so.
        lengths: ``hidden`` lets the layers that follow attend to padding too, since their mask would show each length;
            ``public`` leaves the mask alone, and the card says so.
        joint_autoencoder: train the autoencoder with the model, as the paper does; this voids the guarantee.
        unchecked_records: train without ``example_ids``, if the loader surely uses each record once an epoch. Only the
            number of rows is looked at then, and the card states the assumption.
        secure_rounding: as in `fastdp.ops.clip_noise`.
        public_texts: what the autoencoder or the layers below the noise learned from, for the card.
        output_dir: where the ledger is kept; None keeps it in memory.
        resume: go on with the ledger in ``output_dir``, with the same arguments.
        unsafe_seed: noise that whoever knows the seed can repeat: for tests, and the card says so.

    In training mode each forward pass releases the records of its batch. `set_epoch` says which noise applies, and
    ``example_ids`` [B], ints from 0 to N - 1 among the model's inputs, which records they are (they are taken out before
    the model sees them): a record that comes a second time in an epoch is refused. Outside of training mode every row is
    a release of its own, at the noise of the last epoch, and is counted in ``inference_releases``.

    Raises:
        ValueError: for a layer that does not exist, an autoencoder of another width, values out of range, a model that has
            an EWFT already, or a ledger in ``output_dir`` that is not to be resumed, or not by these arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: int | str,
        noise: NoiseSchedule,
        sequence_length: int,
        dataset_size: int,
        max_norm: float = 1.0,
        autoencoder: Sequence[int] | StackedAutoencoder | None = (64,),
        bottom: str = "frozen",
        lengths: str = "hidden",
        joint_autoencoder: bool = False,
        unchecked_records: bool = False,
        secure_rounding: bool = False,
        public_texts: Sequence[PublicText] = (),
        output_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        unsafe_seed: int | None = None,
    ):
        _check_settings(sequence_length, dataset_size, max_norm, bottom, lengths)
        if unchecked_records and noise.reuse:
            raise ValueError(
                "a schedule that releases once finds its releases by example_ids: leave unchecked_records out"
            )
        self.blocks: Blocks = find_blocks(model)
        self._check_alone()
        self.layer, self.noise, self.max_norm = layer, noise, float(max_norm)
        self.sequence_length, self.dataset_size = int(sequence_length), int(dataset_size)
        self.lengths, self.secure_rounding = lengths, secure_rounding
        self.unchecked_records, self.public_texts = unchecked_records, tuple(public_texts)
        self._after, module = self.blocks.place(layer)
        self._check_lengths_can_be_hidden()
        self.autoencoder = self._autoencoder(autoencoder)
        self.joint_autoencoder = joint_autoencoder
        self.bottom_trained = bottom == "trained"
        self._token_labels = False
        self.ledger = self._open_ledger(output_dir, resume)
        self.frozen_parameters = [] if self.bottom_trained else self._freeze_bottom()
        if self.autoencoder is not None:
            self.autoencoder.encoder.requires_grad_(joint_autoencoder)
        self.stream = NoiseStream() if unsafe_seed is None else NoiseStream.unsafe_reproducible(unsafe_seed)
        self.epoch: int | None = None
        self.inference_releases = 0
        self._rows = 0
        self._seen: Tensor | None = None
        self._codes: Tensor | None = None
        self._ids: Tensor | None = None
        self._mask: Tensor | None = None
        self._tap: str | None = None
        self._sealed = False
        self._hooks = self._attach(model, module)

    # Setting up

    def _check_alone(self) -> None:
        hooks = self.blocks.base._forward_pre_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), EWFT) for hook in hooks):
            raise ValueError("this model has an EWFT already, and both would perturb: call remove() on the first")

    def _autoencoder(self, given: Sequence[int] | StackedAutoencoder | None) -> StackedAutoencoder | None:
        if given is None:
            return None
        width = self.blocks.hidden_size
        made = given if isinstance(given, StackedAutoencoder) else StackedAutoencoder(width, given)
        if made.width != width:
            raise ValueError(f"the autoencoder takes states of width {made.width}, but this model's are {width} wide")
        return made.to(next(self.blocks.base.parameters()).device)

    def _check_lengths_can_be_hidden(self) -> None:
        window = getattr(self.blocks.base.config, "sliding_window", None)
        if self.lengths == "hidden" and window is not None and self._after < len(self.blocks.blocks):
            raise ValueError(
                "this model attends within a sliding window, whose mask cannot hide lengths: pass lengths='public'"
            )

    def _freeze_bottom(self) -> list[str]:
        below = {id(p) for module in self.blocks.before(self.layer) for p in module.parameters()}
        frozen = []
        for name, parameter in self.blocks.model.named_parameters():
            if id(parameter) in below:
                parameter.requires_grad_(False)
                frozen.append(name)
        return frozen

    def _open_ledger(self, output_dir: str | os.PathLike[str] | None, resume: bool) -> accounting.Ledger:
        path = None if output_dir is None else Path(output_dir) / "ledger.jsonl"
        header = {
            "mechanism": self.noise.name,
            "dataset_size": self.dataset_size,
            "unit": "one user's sequence",
            "adjacency": "replace_one",
            "noise_std_over_max_norm": list(self.noise.ratios),
            "layer": self.layer,
            "max_norm": self.max_norm,
            "unchecked_records": self.unchecked_records,
            "flaws": self.flaws(),
        }
        first, *later = (accounting.EventModel(accounting.gaussian(ratio)) for ratio in self.noise.ratios)
        return accounting.Ledger.open_or_create(
            path,
            header,
            event=first,
            budget_steps=1,
            side={_kind(epoch): (model, 1) for epoch, model in enumerate(later, start=2)},
            resume=resume,
        )

    def _attach(self, model: nn.Module, module: nn.Module) -> list[Any]:
        blocks = self.blocks
        # PEFT calls the forward of the model inside it, past that model's hooks: the outermost is what a user calls.
        hooks: list[Any] = [
            model.register_forward_pre_hook(self._take_inputs, with_kwargs=True),
            blocks.base.register_forward_pre_hook(self._take_mask, with_kwargs=True),
            module.register_forward_hook(self._perturb),
        ]
        if self.lengths == "hidden":
            later = blocks.blocks[self._after :]
            hooks += [block.register_forward_pre_hook(self._hide_lengths, with_kwargs=True) for block in later]
        return hooks

    # Use

    def set_epoch(self, epoch: int) -> None:
        """The noise of this epoch, counted from 1, applies from now on. Call it before the epoch's first batch.

        Entering an epoch is recorded as a release of every record, before any is made. Raises ValueError for an epoch
        beyond the schedule's last, RuntimeError when an epoch is gone back to, and BudgetExceeded when an interrupted one
        would be released a second time: go on with the next epoch, or pay for it with `allow_again`.
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
            self._rows, self._seen, self._codes = 0, None, None
        self.epoch = epoch

    def _record(self, epoch: int) -> None:
        if self.ledger.remaining(_kind(epoch)) == 0:
            raise accounting.BudgetExceeded(
                f"records of epoch {epoch} were released already, or may have been before an interruption: go on with the "
                f"next epoch, or allow a second release with allow_again({epoch}) and pay for it"
            )
        self.ledger.record(_kind(epoch))

    def allow_again(self, epoch: int) -> None:
        """Allow one more release of every record at an epoch's noise; it is accounted like any other."""
        self.ledger.extend(self.ledger.budget(_kind(epoch)) + 1, _kind(epoch))
        if not self._sealed:
            self.epoch = None

    def callback(self) -> TrainerCallback:
        """A callback for transformers' Trainer that calls `set_epoch`; needs ``remove_unused_columns=False`` for ids."""
        from fastdp.methods.ewft.callback import EpochCallback

        return EpochCallback(self)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Parameters of the autoencoder that may be trained with the model: its decoder's, which see noisy codes alone."""
        return [] if self.autoencoder is None else [p for p in self.autoencoder.parameters() if p.requires_grad]

    def hidden_states(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
        """Hidden states [B, T, d] at the layer, without noise, of **public** batches of model inputs."""
        for batch in batches:
            yield self._tapped(batch, "hidden")

    def released_codes(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Tensor]:
        """Noisy codes [B, T, k] of batches of queries: all that their receiver gets. Each row is a release, and counted."""
        for batch in batches:
            yield self._tapped(batch, "code")

    @torch.no_grad()
    def _tapped(self, batch: Mapping[str, Any], tap: str) -> Tensor:
        base = self.blocks.base
        training = base.training
        base.eval()
        self._tap = tap
        try:
            base(**{key: value for key, value in batch.items() if key not in ("labels", "example_ids")})
        except _Reached as reached:
            return reached.hidden
        finally:
            self._tap = None
            base.train(training)
        raise RuntimeError("the forward pass never came to the perturbed layer")

    def train_autoencoder(
        self, public_batches: Iterable[Mapping[str, Any]], *, learning_rate: float = 1e-3, with_noise: bool = True
    ) -> list[float]:
        """Train the autoencoder on **public** batches of model inputs, one step each; returns the losses.

        With ``with_noise`` the decoder learns from codes clipped and noised as they will be. See `train_autoencoder`.
        """
        if self.autoencoder is None:
            raise ValueError("there is no autoencoder to train: give its sizes")
        self.autoencoder.requires_grad_(True)
        std = self.noise.ratios[-1] * self.max_norm if with_noise else 0.0
        try:
            return train_autoencoder(
                self.autoencoder,
                self.hidden_states(public_batches),
                learning_rate=learning_rate,
                max_norm=self.max_norm,
                std=std,
                stream=self.stream,
            )
        finally:
            self.autoencoder.encoder.requires_grad_(self.joint_autoencoder)

    def remove(self) -> None:
        """Take the hooks out, so that the model computes as before, and close the ledger. Frozen parameters stay so."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.ledger.close()

    # Hooks

    def _take_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._ids = self._checked_ids(kwargs.pop("example_ids", None))
        labels = kwargs.get("labels")
        self._token_labels |= module.training and isinstance(labels, Tensor) and labels.dim() > 1
        return args, kwargs

    def _take_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "example_ids" in kwargs:
            self._ids = self._checked_ids(kwargs.pop("example_ids"))
        mask = argument(module, args, kwargs)
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if self._tap != "hidden":
            self._check_last_token(argument(module, args, kwargs, "input_ids"))
        return args, kwargs

    def _check_last_token(self, ids: Tensor | None) -> None:
        """Refuse a batch of a classifier that would read another than the last position, since that tells the length."""
        if self.lengths == "public" or not self.blocks.causal or not hasattr(self.blocks.model, "score"):
            return
        config: Any = self.blocks.model.config
        masked = self._mask is not None and not bool(self._mask[:, -1].all())
        # transformers looks for the last token that is not padding in the ids, whatever the mask says.
        padded = ids is not None and config.pad_token_id is not None and bool((ids[:, -1] == config.pad_token_id).any())
        if masked or padded:
            raise ValueError(
                "this classifier reads the last token that is not padding, whose place would give the length away: pad on "
                "the left (tokenizer.padding_side = 'left') with a token that ends no text, or pass lengths='public'"
            )

    def _hide_lengths(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return hide_padding(module, args, kwargs, self.blocks.causal)

    def _perturb(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        self._check_hidden(hidden)
        if self._tap == "hidden":
            raise _Reached(hidden)
        if self.bottom_trained or self.joint_autoencoder:
            released = self._release(self._code(hidden))
        else:
            with torch.no_grad():
                released = self._release(self._code(hidden))
        if self._tap == "code":
            raise _Reached(released)
        decoded = released if self.autoencoder is None else self.autoencoder.decode(released).to(hidden.dtype)
        return (decoded, *output[1:]) if isinstance(output, tuple) else decoded

    def _check_hidden(self, hidden: Tensor) -> None:
        if hidden.dim() != 3 or hidden.shape[1] != self.sequence_length:
            raise ValueError(
                f"a batch has {hidden.shape[1]} tokens a row, not {self.sequence_length}: pad (and cut) every sequence to "
                "sequence_length, as in tokenizer(..., padding='max_length', max_length=...), or its length gives it away"
            )
        if self._tap == "hidden":
            return
        # A recomputation would draw other noise than the forward pass did.
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("the perturbed layer runs again in the backward pass: turn gradient checkpointing off")
        ae = self.autoencoder
        if ae is not None and ae.trained_on is None and not self.joint_autoencoder:
            raise RuntimeError(
                "the autoencoder has not been trained: call train_autoencoder with public text, or set its trained_on to "
                "TrainedPrivately(event); training it on the private sequences themselves would bypass the noise"
            )

    def _code(self, hidden: Tensor) -> Tensor:
        code = hidden if self.autoencoder is None else self.autoencoder.encode(hidden)
        # Padding carries nothing: left in, it would use up the norm that the clip allows.
        return code if self._mask is None else code * self._mask[:, :, None].to(code.dtype)

    def _release(self, code: Tensor) -> Tensor:
        ids, self._ids = self._ids, None
        if not self.blocks.base.training:
            self.inference_releases += code.shape[0]
            return self._noised(code, self.noise.ratios[-1])
        if self.epoch is None:
            raise RuntimeError("no epoch has begun: call set_epoch(1) before the first batch, or use callback()")
        if ids is not None and ids.numel() != code.shape[0]:
            raise ValueError(f"{ids.numel()} example_ids for {code.shape[0]} examples: give one for each")
        if self.noise.reuse:
            return self._reused(code, ids)
        self._count(code.shape[0], ids)
        return self._noised(code, self.noise.ratios[self.epoch - 1])

    def _noised(self, code: Tensor, ratio: float) -> Tensor:
        std = ratio * self.max_norm
        return ops.clip_noise(code, self.max_norm, std, self.stream, secure_rounding=self.secure_rounding)

    def _count(self, rows: int, ids: Tensor | None) -> None:
        """Refuse a batch that would release a record twice in an epoch: by id, or, where that was asked for, by number."""
        if ids is not None:
            self._seen = torch.zeros(self.dataset_size, dtype=torch.bool) if self._seen is None else self._seen
            if bool(self._seen[ids].any()):
                raise RuntimeError(
                    "a record comes a second time in this epoch: each is released once, so sample without replacement"
                )
            self._seen[ids] = True
        elif not self.unchecked_records:
            raise ValueError(
                "training releases each record once an epoch, and must know which those of a batch are: pass example_ids [B]"
                ", or unchecked_records=True if the loader surely uses each record once"
            )
        elif self._rows + rows > self.dataset_size:
            raise RuntimeError(
                f"more than dataset_size = {self.dataset_size} records in epoch {self.epoch}: a second release would not "
                "be covered; call set_epoch at the start of each epoch"
            )
        self._rows += rows

    def _reused(self, code: Tensor, ids: Tensor | None) -> Tensor:
        if ids is None:
            raise ValueError(
                "a schedule that releases once needs to know its records: pass example_ids [B] with each batch"
            )
        if self._codes is None or self._seen is None:
            self._codes = torch.zeros(self.dataset_size, *code.shape[1:], dtype=code.dtype)
            self._seen = torch.zeros(self.dataset_size, dtype=torch.bool)
        new = ~self._seen[ids]
        if bool(new.any()):
            if self._sealed:
                self._record(1)
                self._sealed = False
            at = new.to(code.device)
            self._codes[ids[new]] = self._noised(code[at].detach(), self.noise.ratios[0]).to("cpu")
            self._seen[ids[new]] = True
        return self._codes[ids].to(code.device)

    def _checked_ids(self, ids: Any) -> Tensor | None:
        if ids is None:
            return None
        ids = torch.as_tensor(ids).reshape(-1).to("cpu", torch.int64)
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.dataset_size):
            raise ValueError(f"example_ids must lie between 0 and dataset_size - 1 = {self.dataset_size - 1}")
        if ids.unique().numel() != ids.numel():
            raise ValueError("example_ids holds a record twice in one batch: each is released once")
        return ids

    # Accounting

    def event(self) -> DpEvent:
        """Event of the releases of one training record so far, and of a privately trained autoencoder; sensitivity 2 C."""
        trained_on = None if self.autoencoder is None else self.autoencoder.trained_on
        extra = [trained_on.event] if isinstance(trained_on, TrainedPrivately) else []
        return accounting.compose(self.ledger.event(), *extra)

    def flaws(self) -> list[str]:
        """Why the run carries no guarantee; empty if it does."""
        found = list(self.noise.flaws)
        if self.bottom_trained:
            found.append(_TRAINED_BOTTOM)
        if self.joint_autoencoder and self.autoencoder is not None:
            found.append(_JOINT_AUTOENCODER)
        if self._token_labels:
            found.append(_TOKEN_LABELS)
        return found

    def epsilon(self, delta: float | None = None) -> float:
        """What a training record's releases cost so far, an upper bound without amplification; inf without noise."""
        if sum(self.ledger.spent(kind) for kind in self.ledger.kinds) == 0:
            return 0.0
        if 0.0 in self.noise.ratios:
            return math.inf
        return accounting.epsilon(self.event(), self.noise.delta if delta is None else delta, adjacency="replace_one")

    def inference_epsilon(self, queries: int = 1, delta: float | None = None) -> float:
        """What a sequence costs that was sent ``queries`` times in inference; every query is a fresh release."""
        ratio = self.noise.ratios[-1]
        if ratio == 0:
            return math.inf
        event = accounting.EventModel(accounting.gaussian(ratio)).event(queries)
        return accounting.epsilon(event, self.noise.delta if delta is None else delta, adjacency="replace_one")

    def card(self) -> accounting.Card:
        """What was released about a training record, its cost without amplification, and what is not protected."""
        noise, ae = self.noise, self.autoencoder
        spent = sum(self.ledger.spent(kind) for kind in self.ledger.kinds)
        model = self.blocks.model
        return accounting.Card.build(
            mechanism={
                "name": noise.name,
                "layer": self.layer,
                "sequence_length": self.sequence_length,
                "max_norm": self.max_norm,
                "noise_std_over_max_norm": list(noise.ratios),
                "reuse": noise.reuse,
                "autoencoder": None if ae is None else [ae.width, *ae.sizes],
                "autoencoder_trained_on": None if ae is None or ae.trained_on is None else _origin(ae),
                "public_text": [text.describe() for text in self.public_texts] or described(None),
                **dict(noise.settings),
            },
            unit="one user's sequence",
            adjacency="replace_one",
            sampling="none claimed: the receiver sees which release is whose",
            dataset_size=self.dataset_size,
            noise_multiplier=noise.ratios[-1],
            event=self.event(),
            delta=noise.delta,
            target_epsilon=noise.target_epsilon,
            planned_steps=sum(self.ledger.budget(kind) for kind in self.ledger.kinds),
            spent_steps=spent,
            run_id=self.ledger.run_id,
            ledger_head=self.ledger.head,
            noise_source=accounting.noise_source(self.stream.reproducible, self.secure_rounding),
            model={
                "name": getattr(model.config, "_name_or_path", "") or type(model).__name__,
                "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
                "bottom": "trained" if self.bottom_trained else "frozen",
            },
            flaws=self.flaws(),
            assumptions=(_UNCHECKED,) if self.unchecked_records else (),
            notes=(
                "local differential privacy: the figure holds against whoever receives the perturbed sequences",
                f"each inference query is a further release of epsilon {_shown(self.inference_epsilon())} about the "
                f"sequence in it; {self.inference_releases} were made",
            ),
            unprotected=(*_UNPROTECTED, *(("the length of each sequence",) if self.lengths == "public" else ())),
        )

    # Keeping

    def state_dict(self) -> dict[str, Any]:
        """Autoencoder, epoch, counts and the releases that are reused. They hold noisy codes, and no key."""
        return {
            "autoencoder": None if self.autoencoder is None else self.autoencoder.state_dict(),
            "epoch": self.epoch,
            "seen": self._seen,
            "codes": self._codes,
            "inference_releases": self.inference_releases,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave: kept releases are used again instead of new ones.

        What was released after the state was kept is not known, so an epoch that was interrupted does not go on: set the
        next one, or `allow_again`. A record whose release is not among the kept ones is refused likewise.

        Raises ValueError if the state's autoencoder, or its number of records, is another.
        """
        if (state["autoencoder"] is None) != (self.autoencoder is None):
            raise ValueError("this state was kept with another autoencoder, or none")
        if state["seen"] is not None and len(state["seen"]) != self.dataset_size:
            raise ValueError(f"this state is of {len(state['seen'])} records, not {self.dataset_size}")
        if self.autoencoder is not None:
            self.autoencoder.load_state_dict(state["autoencoder"])
        self.inference_releases = max(self.inference_releases, state["inference_releases"])
        epoch = state["epoch"]
        for begun in range(1, (1 if self.noise.reuse else epoch) + 1 if epoch else 1):
            # A ledger that was begun anew does not know of them.
            if self.ledger.spent(_kind(begun)) == 0:
                self.ledger.record(_kind(begun))
        if self.noise.reuse:
            self.epoch, self._seen, self._codes = epoch, state["seen"], state["codes"]
            self._sealed = epoch is not None


def _check_settings(sequence_length: int, dataset_size: int, max_norm: float, bottom: str, lengths: str) -> None:
    for name, value in (("sequence_length", sequence_length), ("dataset_size", dataset_size)):
        if not (isinstance(value, int) and value >= 1):
            raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
    if not (max_norm > 0 and math.isfinite(max_norm)):
        raise ValueError(f"max_norm is {max_norm}: it must be a positive number")
    if bottom not in ("frozen", "trained"):
        raise ValueError(f"bottom is {bottom!r}: choose 'frozen' or 'trained'")
    if lengths not in ("hidden", "public"):
        raise ValueError(f"lengths is {lengths!r}: choose 'hidden' or 'public'")


def _kind(epoch: int) -> str:
    return STEP if epoch == 1 else f"epoch {epoch}"


def _origin(autoencoder: StackedAutoencoder) -> str:
    return autoencoder.trained_on if isinstance(autoencoder.trained_on, str) else "private records, with its own event"


def _shown(epsilon: float) -> str:
    return "infinite" if math.isinf(epsilon) else f"{epsilon:.3f}"
