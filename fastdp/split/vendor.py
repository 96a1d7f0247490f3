"""The vendor's side: one frozen top for all, and for each customer an adapter, an optimizer and what it sent.

Nothing here knows of the network: `SplitVendor.answer` takes a checked message and the name of who sent it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import peft
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call

import fastdp.files as files
from fastdp.locks import Lock
from fastdp.methods.blocks import find_blocks
from fastdp.methods.encoding import vocabulary_digest
from fastdp.methods.sap import split_model
from fastdp.split.bottom import pack_bottom
from fastdp.split.operations import ServiceDescription, requests
from fastdp.split.run import Run, mixed_seed
from fastdp.split.store import ExampleStore, pad_rows
from fastdp.split.wire import Message, MessageRejected, Outgoing
from fastdp.tls import NAME_IN_WORDS, NAME_PATTERN
from fastdp.validate import positive

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fastdp.split.service import Service

log = logging.getLogger(__name__)
T = TypeVar("T")

_DISCARDED = ".discarded-"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Limits:
    """What one vendor takes from its customers. What does not fit is refused with a reason, or asked to come back.

    Attributes:
        max_tokens: most tokens of an example.
        max_batch: most examples of a step.
        max_examples: most examples that a customer may store.
        max_stored_bytes: most bytes of rows that a customer may store.
        max_message_bytes: most bytes of a message's payload.
        max_customers: most customers that have a run, each with at most one forward pass in memory; and most that call at once.
        calls: most calls, and most connections, of one customer at once.
        queue: most batches that wait to be computed.
        deadline: longest a call may last, in seconds.
    """

    max_tokens: int = 512
    max_batch: int = 64
    max_examples: int = 1_000_000
    max_stored_bytes: int = 16 << 30
    max_message_bytes: int = 16 << 20
    max_customers: int = 64
    calls: int = 4
    queue: int = 64
    deadline: float = 600.0

    def __post_init__(self) -> None:
        positive(**asdict(self))


class VendorCustomer:
    """A customer with a run; its calls take turns.

    Attributes:
        forward_pass: step and logits of the one that waits for its gradient, with what its backward pass needs.
    """

    def __init__(self, run: Run, store: ExampleStore):
        self.run, self.store = run, store
        self.lock = threading.Lock()
        self.forward_pass: tuple[int, Tensor] | None = None


class SplitVendor:
    """Serves the top of a split classifier: customers train adapters of their own over it, and use them.

    Computation happens in one thread, a batch at a time; batches wait in a bounded queue. Every acknowledged step and
    example is on disk, so that a vendor which is killed and started again loses none of them.

    Args:
        model: a classifier of a stock architecture (`fastdp.methods.blocks`); public weights stay as they are.
        folder: for the bottom's file and the customers' runs and examples; a new vendor on it takes them up.
        after: blocks in the customers' bottom.
        tokenizer: of the model, if given: a digest of its vocabulary lets customers compare theirs. It is not sent.
        lora: the adapter that each customer gets; by default rank 8 on the attention's queries and values.
        limits: see `Limits`.

    Raises:
        ValueError: for a model that cannot be split there, or limits that it does not meet.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | Path,
        *,
        after: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        lora: peft.LoraConfig | None = None,
        limits: Limits | None = None,
    ):
        limits = limits or Limits()
        self.folder, self.limits = Path(folder), limits
        blocks = find_blocks(model)
        config: Any = model.config
        bottom, top = split_model(model, after)
        self.causal, self.device = blocks.causal, next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self._folder_lock = Lock.of_folder(self.folder)
        self.bottom = pack_bottom(bottom, self.folder)
        top.requires_grad_(False)
        self.top: Any = peft.get_peft_model(top, lora or default_lora(model))  # type: ignore[arg-type]
        self._template = {name: p for name, p in self.top.named_parameters() if p.requires_grad}
        self.served = ServiceDescription(
            bottom=self.bottom.digest,
            vocabulary="" if tokenizer is None else vocabulary_digest(tokenizer),
            width=blocks.hidden_size,
            classes=int(config.num_labels),
            after=after,
            max_tokens=min(limits.max_tokens, getattr(config, "max_position_embeddings", limits.max_tokens)),
            max_batch=limits.max_batch,
            max_message_bytes=limits.max_message_bytes,
        )
        longest = self.served.max_tokens * self.served.width * 4 + (1 << 16)
        if longest > limits.max_message_bytes:
            raise ValueError(
                f"max_message_bytes is {limits.max_message_bytes}: one example of {self.served.max_tokens} tokens takes "
                f"{longest}"
            )
        self.forms = requests(self.served)
        self._customers: dict[str, VendorCustomer] = {}
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(limits.queue)
        self._compute = ThreadPoolExecutor(1, "fastdp-top")
        self._operations: dict[str, Callable[[str, Message, float], Outgoing]] = {
            op: getattr(self, f"_{op}") for op in self.forms
        }
        for left in self._runs.glob(f"{_DISCARDED}*"):
            shutil.rmtree(left)

    @property
    def _runs(self) -> Path:
        return self.folder / "customers"

    def serve(
        self,
        address: str = "localhost:7443",
        certificates: str | Path | None = None,
        *,
        insecure: bool = False,
        allowed: frozenset[str] | None = None,
    ) -> Service:
        """Start to answer at an address; close what this returns, or use it as a context.

        Args:
            address: host and port; port 0 takes a free one.
            certificates: folder with the vendor's key and certificate, and the authority's certificate.
            insecure: no TLS and no proof of who a customer is; on this machine alone.
            allowed: names of the customers that are let in; None for all that the authority has signed.

        Raises:
            ImportError: without gRPC.
            ValueError: for certificates that cannot be used, or ``insecure`` on an address that others can reach.
            OSError: for an address that is taken.
        """
        from fastdp.split.service import Service

        return Service(self, address, None if certificates is None else Path(certificates), insecure, allowed)

    def answer(self, name: str, message: Message, seconds: float) -> Outgoing:
        """Do what a customer asks.

        Args:
            name: of the customer, as its certificate has it.
            message: checked against `operations.requests`.
            seconds: how long it may take.

        Raises:
            MessageRejected: with the reason. Nothing has changed then, for this customer or another.
        """
        if NAME_PATTERN.fullmatch(name) is None:
            raise MessageRejected(f"a customer's name must be {NAME_IN_WORDS}", "UNAUTHENTICATED")
        return self._operations[message.op](name, message, seconds)

    def close(self) -> None:
        """Finish what is being computed, and let the files go."""
        self._compute.shutdown(cancel_futures=True)
        with self._lock:
            for customer in self._customers.values():
                customer.store.close()
            self._customers.clear()
        self._folder_lock.close()

    def _describe(self, name: str, message: Message, seconds: float) -> Outgoing:
        return Outgoing("describe", {**asdict(self.served), "open": int(Run.is_in(self._runs / name))})

    def _bottom(self, name: str, message: Message, seconds: float) -> Outgoing:
        return Outgoing("bottom", {"config": self.bottom.config, "after": self.served.after}, self.bottom.path)

    def _open(self, name: str, message: Message, seconds: float) -> Outgoing:
        wanted = message.fields
        for key, own in (("bottom", self.served.bottom), ("classes", self.served.classes)):
            if wanted[key] != own:
                raise MessageRejected(f"the run's {key} is {wanted[key]}, this vendor's {own}", "FAILED_PRECONDITION")
        customer = self.customer(name) or self._begin(name, wanted)
        for key, value in customer.run.settings.items():
            if wanted[key] != value:
                raise MessageRejected(
                    f"your run here has {key} {value}, not {wanted[key]}: take it up from the folder it was begun in, or "
                    "discard it",
                    "FAILED_PRECONDITION",
                )
        return Outgoing("open", {"step": customer.run.step, "examples": customer.store.count})

    def _put(self, name: str, message: Message, seconds: float) -> Outgoing:
        first, rows, lengths = message.fields["first"], message.tensors["rows"], self._lengths(message)
        with self._turn(name, seconds) as customer:
            store = customer.store
            if rows.dtype != store.dtype:
                raise MessageRejected(f"rows are {rows.dtype}, and this run's are {store.dtype}")
            # A repeated message is answered as before: its first reply may have been lost.
            if store.digest_of(first) != message.digest:
                self._check_next(store, first, rows, lengths)
                self._submit(lambda: _check_finite("rows", rows), seconds)
                with _refuse_on_full_disk():
                    store.append(rows, lengths, message.digest)
            return Outgoing("put", {"examples": store.count})

    def _check_next(self, store: ExampleStore, first: int, rows: Tensor, lengths: list[int]) -> None:
        """Refuse examples that are not the next ones, or more than a customer may store."""
        if first < store.count:
            raise MessageRejected(
                f"example {first} is here already, with other contents: each example is sent once", "ALREADY_EXISTS"
            )
        if first > store.count:
            raise MessageRejected(f"example {store.count} comes next, not {first}", "ABORTED")
        if store.count + len(lengths) > self.limits.max_examples:
            raise MessageRejected(
                f"{self.limits.max_examples} examples are the most that is kept", "RESOURCE_EXHAUSTED"
            )
        if store.nbytes + rows.nbytes > self.limits.max_stored_bytes:
            raise MessageRejected(
                f"{self.limits.max_stored_bytes} bytes are the most that is kept", "RESOURCE_EXHAUSTED"
            )

    def _forward(self, name: str, message: Message, seconds: float) -> Outgoing:
        step, indices = message.fields["step"], message.tensors["indices"].tolist()
        with self._turn(name, seconds) as customer:
            run = customer.run
            if step != run.step:
                raise MessageRejected(f"the run is at step {run.step}, not {step}", "ABORTED")
            if not all(0 <= index < customer.store.count for index in indices):
                raise MessageRejected(f"an index is out of range: there are {customer.store.count} examples")
            customer.forward_pass = None

            def compute() -> Tensor:
                return self._logits(run, *customer.store.batch(indices, left=self.causal), train=True)

            logits = self._submit(compute, seconds)
            customer.forward_pass = step, logits
            return Outgoing.of("forward", {"step": step}, {"logits": logits.float()})

    def _backward(self, name: str, message: Message, seconds: float) -> Outgoing:
        step, gradient = message.fields["step"], message.tensors["gradient"]
        with self._turn(name, seconds) as customer:
            run = customer.run
            # A repeated message is answered and not applied twice: its first reply may have been lost.
            if step == run.step - 1 and message.digest == run.digest:
                return Outgoing("backward", {"step": run.step, "replayed": 1})
            if step < run.step:
                raise MessageRejected(
                    f"step {step} is taken already, and is not taken twice: the run is at step {run.step}",
                    "ALREADY_EXISTS",
                )
            if customer.forward_pass is None or customer.forward_pass[0] != step:
                raise MessageRejected(f"no forward pass of step {step} is held: begin the step again", "ABORTED")
            logits = customer.forward_pass[1]
            if gradient.shape != logits.shape:
                raise MessageRejected(f"the gradient is for {len(gradient)} examples, the step has {len(logits)}")

            def take() -> None:
                _check_finite("the gradient", gradient)
                customer.forward_pass = None
                run.take_step(logits, gradient, message.digest)

            with _refuse_on_full_disk(), self._forget_on_failure(name):
                self._submit(take, seconds)
                run.save(self._runs / name)
            return Outgoing("backward", {"step": run.step, "replayed": 0})

    def _predict(self, name: str, message: Message, seconds: float) -> Outgoing:
        rows, lengths = message.tensors["rows"], self._lengths(message)
        with self._turn(name, seconds) as customer:
            run = customer.run

            def compute() -> Tensor:
                _check_finite("rows", rows)
                padded, mask = pad_rows(rows, lengths, left=self.causal)
                return self._logits(run, padded, mask, train=False)

            return Outgoing.of("predict", {}, {"logits": self._submit(compute, seconds).float()})

    def _discard(self, name: str, message: Message, seconds: float) -> Outgoing:
        with self._lock:
            customer = self._customers.get(name)
        # A damaged run is in no memory, and may be discarded all the same.
        if customer is not None:
            with self._turn(name, seconds):
                self._rename_discarded(name)
        elif (self._runs / name).exists():
            self._rename_discarded(name)
        for left in self._runs.glob(f"{_DISCARDED}*"):
            shutil.rmtree(left, ignore_errors=True)
        return Outgoing("discard")

    def _rename_discarded(self, name: str) -> None:
        """Rename a run's folder before it is deleted, so that a kill leaves no run with some of its files."""
        with self._lock:
            customer = self._customers.pop(name, None)
            if customer is not None:
                customer.store.close()
            if (self._runs / name).exists():
                os.replace(self._runs / name, self._runs / f"{_DISCARDED}{uuid.uuid4().hex}")

    def customer(self, name: str) -> VendorCustomer | None:
        """What is kept of a customer: its run and the rows that it sent; None for one without a run."""
        with self._lock:
            if name not in self._customers:
                folder = self._runs / name
                try:
                    run = Run.load(folder, self._template)
                    if run is None:
                        return None
                    store = ExampleStore(folder, self.served.width, getattr(torch, run.settings["dtype"]))
                except ValueError as error:
                    # It names the vendor's own paths, which are for its log.
                    log.error("the run of %s cannot be taken up: %s", name, error)
                    raise MessageRejected(
                        "your run here is damaged and cannot be taken up: discard it, and send the rows that you kept",
                        "FAILED_PRECONDITION",
                    ) from None
                self._customers[name] = VendorCustomer(run, store)
            return self._customers[name]

    def _begin(self, name: str, settings: Mapping[str, Any]) -> VendorCustomer:
        with self._lock:
            folder = self._runs / name
            if not folder.exists():
                files.make_folder(self._runs)
                served = [entry for entry in self._runs.iterdir() if not entry.name.startswith(_DISCARDED)]
                if len(served) >= self.limits.max_customers:
                    raise MessageRejected(
                        f"{self.limits.max_customers} customers are the most that are served", "RESOURCE_EXHAUSTED"
                    )
                files.make_folder(folder)
            if not Run.is_in(folder):
                with _refuse_on_full_disk():
                    Run(self._template, settings).save(folder)
        customer = self.customer(name)
        assert customer is not None
        return customer

    @contextmanager
    def _turn(self, name: str, seconds: float) -> Iterator[VendorCustomer]:
        """The customer, for one call at a time."""
        customer = self.customer(name)
        if customer is None:
            raise MessageRejected("you have no run here: open one first", "FAILED_PRECONDITION")
        if not customer.lock.acquire(timeout=seconds):
            raise MessageRejected("another call of yours is still being answered: come back later", "UNAVAILABLE")
        try:
            if self._customers.get(name) is not customer:
                raise MessageRejected("your run was closed meanwhile: take it up again", "ABORTED")
            yield customer
        finally:
            customer.lock.release()

    @contextmanager
    def _forget_on_failure(self, name: str) -> Iterator[None]:
        """Forget a customer if a step fails: memory may be ahead of the disk, from which the next call loads the run."""
        try:
            yield
        except MessageRejected:
            raise
        except BaseException:
            with self._lock:
                self._customers.pop(name).store.close()
            raise

    def _submit(self, work: Callable[[], T], seconds: float) -> T:
        """Run in the computing thread, after what waits there.

        Raises MessageRejected if too much waits, or the time runs out first.
        """
        if not self._places.acquire(blocking=False):
            raise MessageRejected(f"{self.limits.queue} batches are waiting already: come back later", "UNAVAILABLE")

        def compute() -> T:
            try:
                return work()
            finally:
                # Before the caller has its answer: the next call may come at once.
                self._places.release()

        try:
            future = self._compute.submit(compute)
        except RuntimeError:
            self._places.release()
            raise MessageRejected("the vendor is closing: come back later", "UNAVAILABLE") from None
        try:
            return future.result(seconds)
        except FutureTimeout:
            if not future.cancel():
                # It has begun: its outcome must be known before the customer's next call.
                return future.result()
            self._places.release()
            raise MessageRejected(
                "the batch waited longer than the call may last: come back later", "UNAVAILABLE"
            ) from None
        except CancelledError:
            self._places.release()
            raise MessageRejected("the vendor is closing: come back later", "UNAVAILABLE") from None

    def _logits(self, run: Run, rows: Tensor, mask: Tensor, *, train: bool) -> Tensor:
        """Logits [B, classes]; the dropout of a step depends on the run's seed and the step alone."""
        inputs = {"inputs_embeds": rows.to(self.device, self.dtype), "attention_mask": mask.to(self.device)}
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        self.top.train(train)
        with torch.set_grad_enabled(train), torch.random.fork_rng(devices):
            torch.manual_seed(mixed_seed(run.settings["seed"], run.step))
            return functional_call(self.top, run.parameters, (), inputs, tie_weights=False).logits

    def _lengths(self, message: Message) -> list[int]:
        lengths = message.tensors["lengths"].tolist()
        if not all(1 <= length <= self.served.max_tokens for length in lengths):
            raise MessageRejected(f"a length is out of range: examples have 1 to {self.served.max_tokens} tokens")
        if sum(lengths) != len(message.tensors["rows"]):
            raise MessageRejected(
                f"the lengths add up to {sum(lengths)}, and there are {len(message.tensors['rows'])} rows"
            )
        return lengths


def default_lora(model: nn.Module, rank: int = 8) -> peft.LoraConfig:
    """LoRA of scale 2 on the attention's queries and values, and the head whole."""
    kind = getattr(model.config, "model_type", "")
    targets = (
        ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"] if find_blocks(model).causal else ["query", "value"]
    )
    return peft.LoraConfig(
        task_type="SEQ_CLS",
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=kind == "gpt2",
    )


@contextmanager
def _refuse_on_full_disk() -> Iterator[None]:
    """Turn a full disk into a refusal that asks the customer to come back: nothing was changed."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # An error of safetensors has no errno, but its text ends so: "No space left on device (os error 28)".
        number = re.search(r"\(os error (\d+)\)", str(error))
        if (getattr(error, "errno", None) or (number and int(number[1]))) not in _DISK_FULL:
            raise
        # Log its text: a handler that keeps the error itself would keep its frames, and the call with them.
        log.error("the disk is full: %s", str(error))
        raise MessageRejected("the vendor's disk is full: come back later", "UNAVAILABLE") from error


def _check_finite(name: str, values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise MessageRejected(f"{name}: a NaN or an infinity is among the values")
