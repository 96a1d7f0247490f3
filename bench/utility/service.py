"""Accuracy through the split service: a vendor and a customer on this machine, over the network, as its two programs are used."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fastdp.methods.sap import TextPrivatizer
from fastdp.split import Limits, SplitCustomer, SplitVendor

#: Sentences and their classes.
Labelled = tuple[Sequence[str], Sequence[int]]


def accuracy(
    model: torch.nn.Module,
    tokenizer: Any,
    privatizer: Callable[[torch.nn.Module], TextPrivatizer],
    train: Labelled,
    held_out: Labelled,
    *,
    after: int,
    length: int,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Accuracy on held-out texts, privatized too, of the adapter and head that a customer trains at a vendor.

    Args:
        model: what the vendor serves; it stays as it is.
        privatizer: from the model whose embeddings the customer was sent, what replaces its tokens.
        after: blocks in the customer's bottom.
        length: most tokens of a text.
    """
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vendor = SplitVendor(
            model,
            folder / "vendor",
            after=after,
            tokenizer=tokenizer,
            limits=Limits(max_tokens=length),
            keep_every=1000,
        )
        with (
            vendor.serve("localhost:0", insecure=True) as service,
            SplitCustomer(
                service.address, folder / "customer", insecure=True, learning_rate=learning_rate, seed=seed
            ) as customer,
        ):
            own = privatizer(customer.bottom.model)
            customer.send(*train, own)
            customer.train(epochs)
            found = customer.predict(held_out[0], own).argmax(1)
    return float((found == torch.tensor(list(held_out[1]))).double().mean())
