"""The customer's side: texts and labels stay here; privatized rows and gradients of the output leave."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fastdp.files as files
from fastdp.accounting import Card
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.witness import count_release
from fastdp.data import Collator
from fastdp.locks import Lock
from fastdp.methods.encoding import ADDED, encode_private, tokenizer_digest, vocabulary_digest
from fastdp.methods.sap import PrivateBottom, TextPrivatizer
from fastdp.split.bottom import FILE, PackedBottom, published_bottom, unpack_bottom
from fastdp.split.connection import Connection
from fastdp.split.operations import DESCRIPTION_FIELDS, VECTOR_TYPES, ServiceDescription, replies
from fastdp.split.run import mixed_seed
from fastdp.split.store import ExampleStore
from fastdp.split.wire import Message, MessageRejected, Outgoing
from fastdp.validate import integer, one_of, usable_device

RECORD, BOTTOM, LOSSES_FILE, STATEMENT_FILE = "customer.json", "bottom.json", "losses.jsonl", "statement.json"
#: Longest pause, in seconds, before a step is begun anew.
_LONGEST_PAUSE = 2.0
#: Room that a message with rows leaves for its headers.
_HEADER_BYTES = 1 << 16

Privatizer = TextPrivatizer | PrivateBottom


class SplitCustomer:
    """Trains and uses a vendor's model on texts that do not leave: a context manager.

    Each text is privatized once, kept in ``folder``, and sent once. Training then exchanges example numbers, logits and
    their gradients. After a kill of either side, repeat the same calls: they go on where it stopped, to the same adapter.

    Args:
        address: host and port of the vendor.
        folder: for the bottom, the privatized rows and the run's record. It must survive: without it texts would have to be
            released again.
        certificates: the customer's own folder of `make_certificates`.
        insecure, name: no TLS, for a vendor on this machine, and the name that the customer then gives.
        tokenizer: of the published model, from a place that you trust; the vendor sends none. A folder keeps its first one.
        published: folder of the published model, which the vendor's bottom must then be a part of; None compares nothing.
        fixed_length: fill every text up to ``max_tokens`` with random words, which are privatized like its own, so that lengths
            tell nothing by themselves.
        learning_rate, weight_decay: of the vendor's AdamW for this customer.
        batch_size: examples in a step.
        dtype: of the rows: float32, bfloat16 or float16.
        max_tokens: longer texts are cut; by default what the vendor takes.
        device: where the bottom runs, and texts are privatized: a name that torch knows, or ``auto``.
        seed: of the order of examples and of dropout, never of noise.
        deadline: longest a call may last, in seconds.
        patience: how long to wait for a vendor that does not answer, in seconds.

    Attributes:
        bottom: the vendor's bottom, frozen.
        tokenizer: as given.
        served: what the vendor serves.
        store: the privatized rows, as they were sent or will be.
        record: what the folder keeps of the run: its id, the settings that it must keep, and texts sent for prediction.

    Raises:
        ImportError: without gRPC or cryptography.
        ConnectionError: if the vendor cannot be reached.
        ValueError: for settings or certificates that cannot be used, and a vendor that refuses (`MessageRejected`).
    """

    def __init__(
        self,
        address: str,
        folder: str | Path,
        certificates: str | Path | None = None,
        *,
        insecure: bool = False,
        name: str = "customer",
        tokenizer: Any = None,
        published: str | Path | None = None,
        fixed_length: bool = False,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        batch_size: int = 32,
        dtype: str = "float32",
        max_tokens: int | None = None,
        device: str = "cpu",
        seed: int = 0,
        deadline: float = 120.0,
        patience: float = 300.0,
    ):
        one_of(VECTOR_TYPES, dtype=dtype)
        integer(1, batch_size=batch_size)
        self.device = usable_device(device)
        self.folder = Path(folder)
        self.tokenizer, self.fixed_length = tokenizer, fixed_length
        self.batch_size, self.seed, self.dtype = batch_size, seed, dtype
        self._optimizer = {"learning_rate": learning_rate, "weight_decay": weight_decay}
        # Before the lock: a refusal leaves the folder to others.
        self._connection = Connection(
            address,
            None if certificates is None else Path(certificates),
            insecure=insecure,
            name=name,
            deadline=deadline,
            patience=patience,
        )
        with ExitStack() as undo:
            undo.callback(self._connection.close)
            self._lock = undo.enter_context(Lock.of_folder(self.folder))
            described = self._connection.call(Outgoing("describe"), replies(None)).fields
            self.served = ServiceDescription(**{key: described[key] for key in DESCRIPTION_FIELDS})
            #: The forms that this vendor's replies must have, by operation.
            self._forms = replies(self.served)
            if batch_size > self.served.max_batch:
                raise ValueError(f"batch_size is {batch_size}: this vendor takes {self.served.max_batch} at most")
            self.max_tokens = min(max_tokens or self.served.max_tokens, self.served.max_tokens)
            self.record = self._read_record()
            # Only compared: a tokenizer of another vocabulary would choose other rows of the table by the same numbers.
            announced = self.served.vocabulary
            if tokenizer is not None and announced and vocabulary_digest(tokenizer) != announced:
                raise ValueError(
                    "the tokenizer has another vocabulary than the vendor's model: take the one of the published model"
                )
            self.bottom = self._receive_bottom()
            if published is not None:
                self.bottom = published_bottom(self.bottom, self.served.after, Path(published))
            self.bottom.to(self.device)
            self.store = ExampleStore(self.folder / "released", self.served.width, getattr(torch, dtype))
            undo.pop_all()
        self._labels: Tensor | None = None

    def send(
        self,
        texts: Sequence[str],
        labels: Sequence[int],
        privatizer: Privatizer,
        *,
        pairs: Sequence[str] | None = None,
        on_example: Callable[[int, int], None] | None = None,
    ) -> None:
        """Privatize each text once and send it once; called again with the same texts it goes on with what is missing.

        Args:
            texts: private.
            labels: class of each text; they stay here, but see the gradients of `train`.
            privatizer: of the tokens, or of the bottom's rows (a `PrivateBottom` of this customer's bottom).
            pairs: second text of each example, for tasks on pairs.
            on_example: called with the number of examples sent, and of all.

        Raises:
            ValueError: for labels that do not fit, other texts, privatizer or bottom than the folder was begun with, and texts
                that were released before into another place (see `fastdp.accounting.witness`).
        """
        if len(labels) != len(texts) or not len(texts):
            raise ValueError(f"{len(labels)} labels for {len(texts)} texts: give one for each, and at least one text")
        if not all(0 <= int(label) < self.served.classes for label in labels):
            raise ValueError(
                f"a label is not one of 0 to {self.served.classes - 1}, the classes of this vendor's model"
            )
        self._check_privatizer(privatizer)
        examples = self._encode(texts, pairs)
        self._pin_settings(
            {
                "tokenizer": tokenizer_digest(self.tokenizer),
                "fixed_length": self.fixed_length,
                "examples": hashlib.sha256(canonical([examples, list(map(int, labels))]).encode()).hexdigest(),
                # A PrivateBottom has no table to digest, and `_receive_bottom` compares the bottom itself.
                "privatizer": {"eta": privatizer.eta}
                | ({"digest": privatizer.digest()} if isinstance(privatizer, TextPrivatizer) else {"noise": "rows"}),
            }
        )
        self._labels = torch.tensor([int(label) for label in labels])
        if self.record.get("earlier") is None:
            # Counted once a run: a resumed run sends the rows that it kept, and a kill before this is written repeats `run`.
            parts, how = [*texts, *(pairs or ())], f"split, {privatizer.in_short}"
            self.record["earlier"] = count_release(parts, how, self.folder, run=self.record["run"])
            self._write_record()
        sent = self._open()["examples"]
        if sent > self.store.count:
            raise ValueError(
                f"the vendor holds {sent} examples, and {self.folder} only {self.store.count}: discard the run, or bring "
                "the folder back"
            )
        while sent < len(examples):
            if sent == self.store.count:
                block = slice(sent, sent + self._examples_per_message())
                self.store.append(*self._release(examples[block], privatizer, self._labels[block]))
            sent = self._put(sent)
            if on_example is not None:
                on_example(sent, len(examples))

    def train(self, epochs: int, on_step: Callable[[int, int, float], None] | None = None) -> list[float]:
        """Train the adapter on what was sent, up to ``epochs`` passes in all, from wherever the run is.

        The vendor gets the gradient of each batch's logits, from which it can tell the labels.

        Args:
            epochs: passes over the examples since the run began.
            on_step: called with the steps taken, those there will be, and the loss.

        Returns:
            The loss of each step taken here; none if the run was complete. They are kept in ``losses.jsonl`` too, and are
            computed from the labels: do not publish them.

        Raises:
            ValueError: before `send`, or for logits that are not finite.
            ConnectionError: for a vendor that takes no step for the time that patience lasts, as `Connection.call`.
        """
        labels = self._labels
        if labels is None:
            raise ValueError("nothing was sent yet: call send with the texts and labels first")
        self._pin_settings({"batch_size": self.batch_size})
        total = epochs * math.ceil(len(labels) / self.batch_size)
        losses: list[float] = []
        step, failures, give_up = self._open()["step"], 0, math.inf
        with files.appending(self.folder / LOSSES_FILE) as log:
            while step < total:
                try:
                    loss = self._step(step, labels)
                except MessageRejected as refusal:
                    if refusal.code != "ABORTED":
                        raise
                    # The vendor was killed or its disk is full, so it lost the step's forward pass: begin the step again.
                    failures += 1
                    give_up = min(give_up, time.monotonic() + self._connection.patience)
                    if time.monotonic() > give_up:
                        raise ConnectionError(
                            f"the vendor took no step for {self._connection.patience:g} seconds ({refusal}): its disk may be full"
                        ) from None
                    time.sleep(min(0.05 * 2**failures, _LONGEST_PAUSE))
                    step = self._open()["step"]
                    continue
                step, failures, give_up = step + 1, 0, math.inf
                losses.append(loss)
                log.write(canonical({"step": step, "loss": loss}) + "\n")
                log.flush()
                if on_step is not None:
                    on_step(step, total, loss)
        return losses

    def predict(self, texts: Sequence[str], privatizer: Privatizer, *, pairs: Sequence[str] | None = None) -> Tensor:
        """Logits [N, classes] of texts by this customer's adapter. Each call releases its texts anew.

        Raises ValueError before `send`, or for a privatizer of another bottom.
        """
        self._check_privatizer(privatizer)
        examples = self._encode(texts, pairs)
        self.record["predicted"] += len(examples)
        self._write_record()
        found = []
        size = self._examples_per_message()
        for begin in range(0, len(examples), size):
            rows, lengths = self._release(examples[begin : begin + size], privatizer, None)
            message = Outgoing.of("predict", {}, {"rows": rows, "lengths": torch.tensor(lengths)})
            found.append(self._call(message).tensors["logits"])
        return torch.cat(found) if found else torch.empty(0, self.served.classes)

    def discard(self) -> None:
        """Have the vendor delete the run and what was sent; `send` begins another, with the rows that are kept here."""
        self._call(Outgoing("discard"))
        self.record |= {"run": uuid.uuid4().hex, "batch_size": None}
        self._write_record()
        (self.folder / LOSSES_FILE).unlink(missing_ok=True)

    def statement(self, privatizer: Privatizer) -> Card:
        """The privatizer's card, with what has left so far and what each side learns."""
        lengths = self.store.lengths(0, self.store.count)
        return (
            privatizer.statement()
            .with_facts(
                examples_sent=len(lengths),
                rows_sent=sum(lengths),
                texts_sent_for_prediction=self.record["predicted"],
                tokenizer=None if self.tokenizer is None else tokenizer_digest(self.tokenizer),
                vendor_learns=self._vendor_learns(),
                customer_learns=["the bottom's weights", "the outputs of its own adapter"],
            )
            .after(self.record.get("earlier") or ())
        )

    def save_statement(self, privatizer: Privatizer) -> Path:
        """Write `statement` to the folder, and return its path."""
        path = self.folder / STATEMENT_FILE
        files.write(path, self.statement(privatizer).to_json())
        return path

    def close(self) -> None:
        """Let the connection and the files go; the run stays."""
        self._connection.close()
        self.store.close()
        self._lock.close()

    def __enter__(self) -> SplitCustomer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, step: int, labels: Tensor) -> float:
        """One step of training, in two calls: logits of a batch, then their gradients. Returns the loss."""
        indices = batch_of(step, len(labels), self.batch_size, self.seed)
        message = Outgoing.of("forward", {"step": step}, {"indices": indices})
        logits = self._call(message).tensors["logits"]
        if logits.shape[0] != len(indices):
            raise ValueError(f"the logits of step {step} are not of its batch: use another vendor")
        logits.requires_grad_()
        loss = F.cross_entropy(logits, labels[indices])
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"the loss of step {step} is not finite: lower the learning rate, or use another vendor")
        (gradient,) = torch.autograd.grad(loss, logits)
        answer = self._call(Outgoing.of("backward", {"step": step}, {"gradient": gradient}))
        if answer.fields["step"] != step + 1:
            raise ValueError(f"the vendor answered step {step} as if it were at {answer.fields['step']}: use another")
        return float(loss.detach())

    def _put(self, first: int) -> int:
        """Send kept examples from ``first`` on, as many as a message takes. Returns the number that the vendor has."""
        lengths = self.store.lengths(first, self._examples_per_message())
        rows, lengths = self.store.read(first, len(lengths))
        message = Outgoing.of("put", {"first": first}, {"rows": rows, "lengths": torch.tensor(lengths)})
        sent = self._call(message).fields["examples"]
        if not first < sent <= self.store.count:
            raise ValueError(
                f"the vendor counts {sent} examples, of {first + len(lengths)} that it was sent: use another"
            )
        return sent

    def _examples_per_message(self) -> int:
        """Number of examples that fit in a message even if each has ``max_tokens``."""
        longest = self.max_tokens * self.served.width * getattr(torch, self.dtype).itemsize
        return max(1, min(self.served.max_batch, (self.served.max_message_bytes - _HEADER_BYTES) // longest))

    def _release(
        self, examples: list[dict[str, list[int]]], privatizer: Privatizer, labels: Tensor | None
    ) -> tuple[Tensor, list[int]]:
        """Privatize examples: rows [sum of lengths, width] and lengths, which may leave."""
        batch = Collator(0)([self._filled(example) for example in examples] if self.fixed_length else examples)
        ids, mask, added = batch.pop("input_ids"), batch.pop("attention_mask"), batch.pop(ADDED)
        with torch.no_grad():
            inputs = {key: value.to(self.device) for key, value in {"attention_mask": mask, **batch}.items()}
            if isinstance(privatizer, PrivateBottom):
                hidden = privatizer(ids.to(self.device), **inputs)
            else:
                # CTI weighs a token by what it tells of the label.
                weighed_by = None if privatizer.cti is None else labels
                private = privatizer(ids, attention_mask=mask, special_tokens_mask=added, labels=weighed_by)
                hidden = self.bottom(private.to(self.device), **inputs)
        rows = hidden.cpu()[mask.bool()].to(getattr(torch, self.dtype))
        if not bool(torch.isfinite(rows).all()):
            raise ValueError("the bottom gives a NaN or an infinity, which no noise hides: use another vendor or dtype")
        return rows, mask.sum(1).tolist()

    def _encode(self, texts: Sequence[str], pairs: Sequence[str] | None) -> list[dict[str, list[int]]]:
        """Tokens of each text, and which of them the tokenizer added: those alone may leave as they are."""
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer: give SplitCustomer the published model's, as tokenizer")
        if self.fixed_length and pairs is not None:
            raise ValueError(
                "fixed_length is for single texts: the separator of a pair shows where its first text ends"
            )
        config: Any = self.bottom.model.config
        keys = ("input_ids", "token_type_ids", ADDED) if hasattr(config, "type_vocab_size") else ("input_ids", ADDED)
        found = encode_private(self.tokenizer, texts, pairs, special=True, truncation=True, max_length=self.max_tokens)
        examples = [{key: found[key][at] for key in keys if key in found} for at in range(len(texts))]
        for at, example in enumerate(examples):
            if not example["input_ids"]:
                raise ValueError(f"text {at} has no tokens: leave it out")
        return examples

    @cached_property
    def _words(self) -> list[int]:
        """Tokens that stand for text, from which `_filled` draws."""
        return sorted(set(range(len(self.tokenizer))) - set(self.tokenizer.all_special_ids))

    def _filled(self, example: dict[str, list[int]]) -> dict[str, list[int]]:
        """The example with ``max_tokens`` tokens: random words follow its last word, before the tokenizer's closing tokens."""
        added = example[ADDED]
        end = next((at for at in reversed(range(len(added))) if not added[at]), len(added) - 1) + 1
        missing = self.max_tokens - len(added)
        fillers = {"input_ids": secrets.SystemRandom().choices(self._words, k=missing), ADDED: [0] * missing}
        filled = {}
        for key, values in example.items():
            # Other columns, such as segments, repeat the last word's value.
            filler = fillers.get(key, [values[end - 1]] * missing)
            filled[key] = [*values[:end], *filler, *values[end:]]
        return filled

    def _vendor_learns(self) -> list[str]:
        length = (
            f"rows of {self.max_tokens} tokens a text, in which its end is as private as a word"
            if self.fixed_length
            else "the length of each text, which may tell what is in it; of a pair, both lengths and the segments"
        )
        return [
            "the privatized rows, and where the tokenizer opens, separates and closes texts",
            length,
            "the order of the texts, the seed that shuffles them, and which examples share a batch",
            "the gradient of each output, which tells the label of each example",
            "the output of every training step and of every prediction",
            "how often and when texts are sent for prediction",
        ]

    def _check_privatizer(self, privatizer: Privatizer) -> None:
        if isinstance(privatizer, PrivateBottom):
            if privatizer.bottom is not self.bottom:
                raise ValueError("the PrivateBottom is of another bottom: make it with customer.bottom")
            if privatizer.trainable:
                raise ValueError(
                    "the bottom is trainable: each pass would release every text anew, so the network program takes a frozen one"
                )
        elif not isinstance(privatizer, TextPrivatizer):
            raise ValueError("a TextPrivatizer or a PrivateBottom is needed: nothing is sent as it is")

    def _open(self) -> dict[str, Any]:
        """Begin the run at the vendor, or go on with it. Returns how far it is: examples received, and steps taken."""
        settings = {
            **self._optimizer,
            "run": self.record["run"],
            "bottom": self.served.bottom,
            "classes": self.served.classes,
            "dtype": self.dtype,
            "seed": self.seed,
        }
        return self._call(Outgoing("open", settings)).fields

    def _call(self, message: Outgoing) -> Message:
        return self._connection.call(message, self._forms)

    def _receive_bottom(self) -> Any:
        """Load the bottom from the folder, where it is first downloaded to."""
        path = self.folder / FILE
        known = json.loads((self.folder / BOTTOM).read_text()) if (self.folder / BOTTOM).exists() else None
        if known is None or known["digest"] != self.served.bottom:
            if known is not None and self.record["examples"] is not None:
                raise ValueError(f"{self.folder} was begun with another bottom than this vendor's: use another folder")
            with files.atomic_path(path) as aside:
                fields = self._connection.call(Outgoing("bottom"), self._forms, aside).fields
            known = {**fields, "digest": self.served.bottom}
            files.write_json(self.folder / BOTTOM, known)
        if known["after"] != self.served.after:
            raise ValueError(f"the bottom has {known['after']} blocks, and the vendor says {self.served.after}")
        bottom = unpack_bottom(PackedBottom(path, known["config"], known["digest"]), known["after"])
        config: Any = bottom.model.config
        width, positions = config.hidden_size, getattr(config, "max_position_embeddings", self.served.max_tokens)
        if width != self.served.width or positions < self.served.max_tokens:
            raise ValueError(
                f"the bottom is {width} wide with {positions} positions, and the vendor says {self.served.width} and "
                f"{self.served.max_tokens}: use another vendor"
            )
        return bottom

    def _read_record(self) -> dict[str, Any]:
        path = self.folder / RECORD
        if path.exists():
            return json.loads(path.read_text())
        fresh = {"run": uuid.uuid4().hex, "examples": None, "privatizer": None, "batch_size": None, "predicted": 0}
        files.write_json(path, fresh)
        return fresh

    def _write_record(self) -> None:
        files.write_json(self.folder / RECORD, self.record)

    def _pin_settings(self, settings: Mapping[str, Any]) -> None:
        """Record settings the first time, and refuse other values later."""
        for key, value in settings.items():
            if self.record.get(key) not in (None, value):
                raise ValueError(
                    f"{self.folder} was begun with other {key.replace('_', ' ')}: use those, or another folder"
                )
            self.record[key] = value
        self._write_record()


def batch_of(step: int, examples: int, batch_size: int, seed: int) -> Tensor:
    """Numbers of the examples of a step: each pass is a permutation of its own, the last batch of it may be smaller."""
    epoch, at = divmod(step, math.ceil(examples / batch_size))
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
    return torch.randperm(examples, generator=generator)[at * batch_size : (at + 1) * batch_size]
