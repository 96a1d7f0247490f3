"""A training step over loopback TLS against the same step in one process; and many customers that send at once.

The vendor runs in a process of its own, as it does in use, and so does each half of the comparison: the customer's process
takes one step in itself, then one through the vendor, alternating. Batches are read from disk on both sides.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .memory import ENVIRONMENT, held, process
from .record import parser_of, write
from .workloads import Case, build

_ETA = 100.0


@dataclass(frozen=True)
class Shape:
    """A BERT of random weights, and a batch. The default is MiniLM-L6 with 32 texts of 64 tokens."""

    layers: int = 6
    width: int = 384
    vocabulary: int = 30522
    rows: int = 32
    tokens: int = 64


SHAPES = {"default": Shape(), "tiny": Shape(2, 32, 200, 4, 8)}


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write to --json."""
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SHAPES, default="default")
    parser.add_argument("--steps", type=int, default=7, help="steps timed")
    parser.add_argument("--customers", type=int, default=32)
    given = parser.parse_args(arguments)
    shape = SHAPES[given.size]
    figures = {"shape": vars(shape), "step": step(shape, given.steps), "load": load(shape, given.customers)}
    print(json.dumps(figures, indent=1))
    write(given.json, figures)


def make_model(shape: Shape) -> Any:
    """The same weights in every process."""
    sizes = shape.layers, shape.width, 4 * shape.width, max(1, shape.width // 32)
    return build(Case("bert", *sizes, vocabulary=shape.vocabulary, tokens=512, dropout=0.0), torch.device("cpu"))


class IdsOfText:
    """In place of a tokenizer: a text is its ids, and every text is as long as the batch needs."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        """Ids of each text, none of them the tokenizer's own."""
        ids = [[int(token) for token in text.split()] for text in texts]
        return {"input_ids": ids, "special_tokens_mask": [[0] * len(own) for own in ids]}


def texts_of(shape: Shape, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Texts of exactly ``shape.tokens`` tokens, and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, shape.vocabulary, (count, shape.tokens), generator=generator).tolist()
    return [" ".join(map(str, row)) for row in ids], torch.randint(0, 2, (count,), generator=generator).tolist()


# In the vendor's process

_vendor: Any = None
_service: Any = None


def _serve(shape: Shape, folder: Path) -> str:
    """Begin to serve; returns the address."""
    global _service, _vendor
    from fastdp.split import Limits, SplitVendor

    limits = Limits(max_tokens=shape.tokens, max_batch=shape.rows)
    _vendor = SplitVendor(make_model(shape), folder / "vendor", limits=limits)
    _service = _vendor.serve("localhost:0", folder / "certificates" / "vendor")
    return str(_service.address)


def _close() -> None:
    _service.close()


def _memory() -> dict[str, int]:
    """What the process holds, and of it adapters with their optimizers, and the examples that came."""
    runs = [customer.run for customer in _vendor._customers.values()]
    adapters = sum(
        p.nbytes + sum(value.nbytes for value in run.optimizer.state[p].values())
        for run in runs
        for p in run.parameters.values()
    )
    examples = sum(customer.store.count for customer in _vendor._customers.values())
    memory = {"resident_bytes": held("VmRSS"), "peak_bytes": held("VmHWM")}
    return {**memory, "adapter_bytes": adapters, "examples": examples}


# The customers'


@contextmanager
def _serving(
    shape: Shape, folder: Path, customers: list[str], environment: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], dict[str, int]]]]:
    """The address of a vendor in a process of its own, and what says what that holds."""
    from fastdp.split import make_certificates

    make_certificates(folder / "certificates", customers)
    with process(environment) as vendor:
        address = vendor.submit(_serve, shape, folder).result()
        try:
            yield address, lambda: vendor.submit(_memory).result()
        finally:
            vendor.submit(_close).result()


def _customer(address: str, shape: Shape, folder: Path, name: str) -> Any:
    from fastdp.split import SplitCustomer

    return SplitCustomer(
        address,
        folder / f"state-{name}",
        folder / "certificates" / name,
        batch_size=shape.rows,
        max_tokens=shape.tokens,
        tokenizer=IdsOfText(),
    )


# What is measured


def step(shape: Shape, steps: int) -> dict[str, Any]:
    """Median seconds of a step in one process and through the vendor, and their ratio.

    Refuses to report if the losses of the two differ.
    """
    from fastdp.methods.sap import PrivateBottom
    from fastdp.split.customer import batch_of

    texts, labels = texts_of(shape, 4 * shape.rows, 1)
    times: dict[str, list[float]] = {"in_process": [], "over_tls": []}
    with (
        tempfile.TemporaryDirectory() as place,
        _serving(shape, Path(place), ["alice"], {}) as (address, _),
        _customer(address, shape, Path(place), "alice") as customer,
    ):
        customer.send(texts, labels, PrivateBottom(customer.bottom, eta=_ETA))
        alone = InProcess(make_model(shape), customer._store, torch.tensor(labels))
        for number in range(steps + 2):
            begin = time.perf_counter()
            expected = alone.step(batch_of(number, len(texts), shape.rows, 0))
            middle = time.perf_counter()
            _, found = customer._step(number, torch.tensor(labels))
            end = time.perf_counter()
            # Dropout is off, so that both compute the same.
            if not abs(found - expected) < 1e-4:
                raise RuntimeError(f"the loss of step {number} is {found}, and {expected} in one process")
            times["in_process"].append(middle - begin)
            times["over_tls"].append(end - middle)
    times = {name: found[2:] for name, found in times.items()}
    ratio = statistics.median(b / a for a, b in zip(times["in_process"], times["over_tls"]))
    return {
        **{f"{name}_seconds": statistics.median(found) for name, found in times.items()},
        "ratio": ratio,
        "bar": 1.25,
    }


class InProcess:
    """A step without a network: the vendor's top, adapter and optimizer, and rows from the customer's store.

    Attributes:
        bottom: the frozen rest of the model.
    """

    def __init__(self, model: Any, store: Any, labels: Tensor):
        import peft

        from fastdp.methods.sap import split_model
        from fastdp.split.vendor import default_lora

        self.bottom, top = split_model(model)
        top.requires_grad_(False)
        self.top = peft.get_peft_model(top, default_lora(model)).train()  # type: ignore[arg-type]
        trained = [p for p in self.top.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.01)
        self.store, self.labels = store, labels

    def step(self, indices: Tensor) -> float:
        """Take it on these examples; returns the loss."""
        rows, mask = self.store.batch(indices.tolist(), left=False)
        logits = self.top(inputs_embeds=rows, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits, self.labels[indices])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def load(shape: Shape, customers: int) -> dict[str, Any]:
    """Customers that send all at once, and each take a step: what arrived, and the vendor's memory.

    Memory is what the vendor's process grew by since it began to serve, over its customers' adapters and optimizers and
    one batch each. A batch is what its step holds between forward and backward, measured with one customer alone.
    """
    names = [f"customer-{number}" for number in range(customers)]
    with (
        tempfile.TemporaryDirectory() as place,
        _serving(shape, Path(place), [*names, "first"], ENVIRONMENT) as (address, memory),
    ):
        folder = Path(place)
        texts, labels = texts_of(shape, shape.rows, 2)
        first = _customer(address, shape, folder, "first")
        _send_and_step(first, texts, labels)
        warm = memory()
        _send_and_step(first, texts, labels, hold=True)
        holding = memory()
        batch = holding["resident_bytes"] - warm["resident_bytes"]
        everyone = [_customer(address, shape, folder, name) for name in names]
        begin = time.perf_counter()
        with ThreadPoolExecutor(customers) as pool:
            list(pool.map(lambda customer: _send_and_step(customer, texts, labels, hold=True), everyone))
        seconds = time.perf_counter() - begin
        after = memory()
        for customer in [first, *everyone]:
            customer.close()
    grown = after["peak_bytes"] - warm["resident_bytes"]
    allowed = after["adapter_bytes"] + (customers + 1) * batch
    return {
        "customers": customers,
        "seconds": seconds,
        "examples_sent": (customers + 1) * shape.rows,
        "examples_arrived": after["examples"],
        "adapter_bytes": after["adapter_bytes"],
        "batch_bytes": batch,
        "grown_bytes": grown,
        "ratio": grown / allowed,
        "bar": 1.5,
    }


def _send_and_step(customer: Any, texts: list[str], labels: list[int], hold: bool = False) -> None:
    """Send; then take a step, or leave it between forward and backward."""
    from fastdp.methods.sap import PrivateBottom
    from fastdp.split.wire import Outgoing

    customer.send(texts, labels, PrivateBottom(customer.bottom, eta=_ETA))
    position = customer._open()["step"]
    if hold:
        message = Outgoing.of("forward", {"step": position}, {"indices": torch.arange(len(texts))})
        customer._call(message)
    else:
        customer._step(position, torch.tensor(labels))


if __name__ == "__main__":
    main()
