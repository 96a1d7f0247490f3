"""One step of each method on a device, against the same step on the processor: equal draws, so equal weights and texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import fastdp
from fastdp.methods import ewft
from fastdp.methods.rapft import PublicMap
from fastdp.methods.sap import PrivateBottom, split_model
from fastdp.methods.selective.mechanism import TokenMechanism
from fastdp.ops.table import OPS

from .workloads import Case, build, examples

CASE = Case("llama", 2, 64, 128, 4, 4, 512, 8, 32)
ROWS = CASE.rows
BOUND = 100.0


def _model(device: str) -> torch.nn.Module:
    return build(CASE, torch.device("cpu")).to(device)


def _batch(device: str) -> dict[str, Tensor]:
    rows = examples(CASE, ROWS)
    return {key: torch.stack([row[key] for row in rows]).to(device) for key in rows[0]}


def _table() -> Tensor:
    return torch.randn(CASE.vocabulary, 16, generator=torch.Generator().manual_seed(5))


def _trained(method: Callable[[], Any], device: str) -> Tensor:
    """What two private steps change of the weights."""
    model = _model(device)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: Any = torch.utils.data.DataLoader(examples(CASE, 2 * ROWS), batch_size=ROWS)  # type: ignore[arg-type]
    # No example is clipped: the bounds of norms that clip may be up to 1 / 64 above them, and differ between devices.
    privacy: dict[str, Any] = {"noise_multiplier": 1e-4, "epochs": 1, "sampling": "shuffled", "unsafe_seed": 3}
    private = fastdp.make_private(model, optimizer, rows, method=method(), target_delta=1e-5, **privacy)
    for batch in private.data_loader:
        model(**{key: value.to(device) for key, value in batch.items()}).loss.backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    return torch.cat([(p.detach() - b).flatten() for p, b in zip(model.parameters(), before)])


def _hidden(device: str) -> Tensor:
    """EW-FT's logits behind a released hidden state."""
    model, inputs = _model(device), _batch(device)
    noise = ewft.NoiseSchedule("constant", (0.1, 0.1), 1e-5)
    settings: dict[str, Any] = {"sequence_length": CASE.tokens, "dataset_size": ROWS, "autoencoder": None}
    fastdp.EWFT(model, layer=1, noise=noise, unsafe_seed=0, **settings).set_epoch(1)
    inputs.pop("labels")
    return model(**inputs, example_ids=torch.arange(ROWS)).logits


def _split(device: str) -> Tensor:
    """SAP's perturbed texts, and the hidden states that leave a private bottom."""
    ids = _batch("cpu")["input_ids"]
    perturb = fastdp.TextPrivatizer(_table().to(device), eta=4.0, unsafe_seed=3)
    bottom, _ = split_model(_model(device), 1)
    sent = PrivateBottom(bottom, eta=5.0, unsafe_seed=2)(input_ids=ids.to(device))
    return torch.cat([perturb(ids.to(device)).flatten().cpu().float(), sent.detach().flatten().cpu()])


def _selective(device: str) -> Tensor:
    """What the federated method draws in the place of private tokens."""
    mechanism = TokenMechanism("local", _table().to(device), 3.0, candidates=torch.arange(CASE.vocabulary) > 2)
    stream = fastdp.NoiseStream.unsafe_reproducible(1)
    return mechanism.draw(_batch("cpu")["input_ids"].flatten(), 2.0, stream).float()


METHODS: dict[str, Callable[[str], Tensor]] = {
    "DP-SGD": partial(_trained, lambda: fastdp.DPSGD(max_grad_norm=BOUND)),
    "Rap-FT": partial(_trained, lambda: fastdp.RapFT(PublicMap([_batch("cpu")]), max_grad_norm=BOUND)),
    "DP-FROST": partial(
        _trained, lambda: fastdp.DPFrost(0.25, BOUND, selection_steps=1, selection_noise_multiplier=1e-3)
    ),
    "SAP": _split,
    "EW-FT": _hidden,
    "selective": _selective,
}


def methods(device: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """The error of a device's result, relative to the processor's."""
    choice = OPS["exponential_choice"]
    for name, run in METHODS.items():
        # A processor's own draws follow the same law from other numbers.
        with mock.patch.dict(choice.implementations, cpu=choice.reference):
            truth = run("cpu").detach().double()
        error = (run(device).detach().cpu().double() - truth).norm() / truth.norm()
        # A sum that falls beside a point of the noise's grid moves by one.
        yield f"method {name}", (float(error), 1e-3)
