"""Mistakes seen in real systems; `tests/mutants.yaml` makes most of them, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.ops.noise import standard_normals
from tests.cases import cases
from tests.engine.models import batch as model_batch, build
from tests.engine.reference import Recording, engine_for, norms as sizes, ticket
from tests.engine.runs import (
    CLIPPED,
    EXACT,
    Classifier,
    clipped_sum,
    error,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    opaque,
    start,
)
from tests.noise import Add, replace_noise


def notices(check: Callable[[], None], *errors: type[BaseException]) -> None:
    """Assert that a check fails now that the fault is in."""
    with pytest.raises((AssertionError, *errors)):
        check()


class Tied(nn.Module):
    """A next-token model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.middle(self.table(ids))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def _ids(rows: int = 4, tokens: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 11, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :3] = -100
    return {"ids": ids, "labels": labels}


def _norms(model: nn.Module, data: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    engine, tickets = engine_for(model, 1.0, **options)
    tickets.append(ticket(len(data["labels"])))
    model(**data)["loss"].backward()
    engine.close()
    return Recording.seen[-1][0] if engine.route == "uses" else torch.stack([n[0, 0] for n in Recording.seen])


def test_noise_is_drawn_in_float32_for_bf16_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    std, seed = 1e6, 3

    def check() -> None:
        model = Classifier().bfloat16()
        data = [{**e, "x": e["x"].bfloat16()} for e in examples()]
        # On a grid the noise would differ from the normals by more than bf16's rounding.
        options = {"noise_multiplier": std, "unsafe_seed": seed, "secure_rounding": False}
        got, _ = logical_step(start(model, loader(data), **options))
        stream = fastdp.NoiseStream.unsafe_reproducible(2 * seed)
        for index, (name, gradient) in enumerate(got.items()):
            noise = std / 8 * standard_normals(stream.at(0, index).take(), gradient.numel()).view(gradient.shape)
            assert gradient.dtype == torch.bfloat16
            # Half a unit in the last of bf16's 8 bits, at most 2^-8; the clipped sum over 8 and float32's rounding are below 4.
            assert bool(((gradient.double() - noise).abs() <= noise.abs() * 2**-8 + 4).all()), name

    check()

    def in_bf16(total: torch.Tensor, std: float, add: Add) -> None:
        noise = torch.zeros_like(total, dtype=torch.bfloat16)
        add(noise, 1.0)
        total.add_(noise.float() * std)

    replace_noise(monkeypatch, in_bf16)
    notices(check)


def test_a_batch_that_was_begun_and_left_adds_nothing_to_the_next() -> None:
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=2)
    private.model(**next(iter(private.data_loader)))["loss"].backward()  # begun, and left
    got, batches = logical_step(private)
    expected = clipped_sum(one_by_one(private.model, join(batches)), 0.5)
    assert error(got, {n: t / 8 for n, t in expected.items()}) < CLIPPED


@cases("two_pass", [False, True])
def test_ignored_labels_mean_the_same_on_every_route(two_pass: bool) -> None:
    data = _ids()
    data["labels"][2] = -100  # an example without labels has loss 0

    class OddTied(Tied):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(opaque(F.linear, self.table(ids), self.middle.weight) + self.middle.bias)
            logits = self.head(hidden)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            return {"loss": loss / (labels[:, 1:] != -100).sum().clamp(min=1)}

    truth = sizes(one_by_one(OddTied(), data))
    assert float(truth[2]) == 0
    assert torch.allclose(_norms(Tied(), data, two_pass=two_pass).double(), truth, rtol=EXACT)
    with pytest.warns(UserWarning, match="one-example route"):
        by_rows = _norms(OddTied(), data)
    assert torch.allclose(by_rows.double(), truth, rtol=EXACT)


def test_a_saved_adapter_loads_in_plain_peft(tmp_path: Any) -> None:
    import peft

    model = build("gpt2", "lora")
    before = list(model.state_dict())
    data = model_batch("gpt2")
    engine, tickets = engine_for(model, 1.0)
    tickets.append(ticket(4))
    model(**data).loss.backward()
    assert list(model.state_dict()) == before
    model.save_pretrained(tmp_path)
    plain = build("gpt2")
    base = {n: t for n, t in model.state_dict().items() if "lora_" not in n}
    plain.load_state_dict({n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in base.items()})
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    with torch.no_grad():
        assert torch.equal(model.eval()(**data).logits, loaded.eval()(**data).logits)
