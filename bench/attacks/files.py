"""Attacks on ledgers, cards, checkpoints, noise, public text and settings of a network."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fastdp
from fastdp.accounting import verify
from fastdp.accounting.card import digest

from . import kit
from .kit import NOISE, Library, Net, Task, equal, net, nothing, records, unless

attack = kit.register("files")


# Ledgers and cards.


@attack(
    "A run's folder is copied, both copies go on, and each card tells half of what was released.",
    off={"fastdp.accounting.ledger.check_ledger": nothing},
)
def copied_folder(library: Library) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder, twin = Path(name) / "run", Path(name) / "copy"
        library.go_on(folder, 2, resume=False)
        shutil.copytree(folder, twin)
        library.go_on(folder, 2, resume=True)
        return 6 / (library.go_on(twin, 2, resume=True) + 2)


@attack(
    "A rewritten card verifies beside the run's ledger once its digest is recomputed.",
    off={"fastdp.accounting.verification._check_ledger": lambda card, path: []},
)
def rewritten_card(library: Library) -> float:
    with tempfile.TemporaryDirectory() as folder:
        task = Task(Net, options={**NOISE, "output_dir": folder})
        private = library.start(task, records())
        list(library.steps(private, task))
        card, ledger = dict(private.card()), Path(folder) / "ledger.jsonl"
        private.detach()
        assert verify(card, ledger=ledger)
        for forgery in ({"unit": "user (at most 99 examples)"}, {"dataset_size": 10**9}, {"adjacency": "zero_out"}):
            forged = {**card, **forgery}
            forged["digest"] = digest(forged)
            alone = verify(forged)
            if verify(forged, ledger=ledger).guarantee or (alone.guarantee and not alone.unchecked):
                return math.inf
        # Of duplicate keys readers keep the last, and people see the first.
        twice = json.dumps(card)[:-1] + ', "unit": ' + json.dumps(card["unit"]) + "}"
        return unless(not verify(twice).guarantee)


@attack("The files of a private run can be read by every user of the machine.", off={"fastdp.files._PRIVATE": 0o644})
def readable_by_all(library: Library) -> float:
    with tempfile.TemporaryDirectory() as name:
        library.go_on(Path(name), 2, resume=False)
        files = [path for path in Path(name).rglob("*") if path.is_file()]
        return unless(not any(path.stat().st_mode & 0o077 for path in files))


# Runs that share weights.


def _run(library: Library, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = library.start(Task(lambda: model), records(), **NOISE, optimizer=optimizer, epochs=2)
    list(library.steps(private, Task(Net)))
    return private


@attack(
    "A trained model, its copy or a part of it is trained anew, and the card tells only the second run.",
    off={"fastdp.private.provenance.Provenance.sentences": lambda own: []},
)
def trained_before(library: Library) -> float:
    moved = []
    takes: tuple[Callable[[Any], nn.Module], ...] = (
        lambda model: model,
        copy.deepcopy,
        lambda model: net(parts={"first": lambda: model.first})(),
    )
    for take in takes:
        first = _run(library, Net())
        first.detach()
        second = _run(library, take(first.model))
        told = any(first.ledger.run_id in sentence for sentence in second.card()["assumptions"])
        moved.append(1.0 if told else (first.epsilon() + second.epsilon()) / second.epsilon())
    return max(moved)


# Noise.


@attack(
    "The noise levels of a checkpoint are edited, and the card states the old ones.",
    off={
        "fastdp.private.steps.Steps._require_noise": nothing,
        "fastdp.private.run.math.isclose": lambda *_, **__: True,
    },
)
def edited_checkpoint(library: Library) -> float:
    task = Task(Net, options={**NOISE, "epochs": 4})
    private = library.start(task, records())
    state = private.state_dict()
    private.load_state_dict({**state, "stds": [1e-3 * std for std in state["stds"]]})
    list(library.steps(private, task))
    private.detach()
    return float(private.noise_multiplier / private.policy.noise_multiplier)


@attack(
    "torch.manual_seed, which every training script calls, makes the noise the same in every run.",
    off={"fastdp.ops.stream.os.urandom": lambda size: bytes(torch.randint(0, 256, (size,)).tolist())},
)
def seeded_noise(library: Library) -> float:
    first, second = (library.release(Task(Net), records(), noise_multiplier=1.0).sums for _ in range(2))
    return unless(not all(equal(first[name], second[name]) for name in first))


@attack("The low bits of noised zeros tell which rows of a table got no gradient.", unmode={"secure_rounding": False})
def zero_sum_noise(library: Library) -> float:
    def mean(own: Any, ids: torch.Tensor) -> torch.Tensor:
        return own.head(own.table(ids).mean(1))

    def table() -> nn.Embedding:
        return nn.Embedding(400, 16, _weight=torch.zeros(400, 16))

    model = net(kit.Model, parts={"table": table, "head": lambda: nn.Linear(16, 4)}, forward=mean)
    task = Task(model, criterion=lambda out, _: out.square().mean() + out.sum(1).mean())
    data = [{"ids": torch.randint(0, 200, (6,), generator=torch.Generator().manual_seed(seed))} for seed in range(16)]
    held, std = {int(token) for record in data for token in record["ids"]}, 37.3
    values = library.release(task, data, noise_multiplier=std).sums["table.weight"]
    # Float32 numbers z for which std z is the value, where there are any: noise that nothing was added to.
    near = (values.double() / std).float()
    tried = (near, torch.nextafter(near, torch.tensor(math.inf)), torch.nextafter(near, torch.tensor(-math.inf)))
    alone = torch.stack([torch.tensor(std) * z == values for z in tried]).any(0).all(1)
    named = {int(row) for row in (~alone).nonzero()[:, 0]}
    return unless(len(named & held) < 8 or bool(named - held))


@attack(
    "Shuffled batches are accounted for as if they were Poisson samples.",
    off={
        "fastdp.private.plan.Plan.step": lambda own, sigma: fastdp.accounting.dpsgd_model(
            sigma, own.sample_rate, "poisson", own.steps_per_epoch
        )
    },
)
def shuffled_accounting(library: Library) -> float:
    from dp_accounting import GaussianDpEvent

    options = {"sampling": "shuffled", "batch_size": 10, "noise_multiplier": 2.0, "target_delta": 1e-5}
    task = Task(Net, options=options)
    private = library.start(task, records(1000))
    list(library.steps(private, task))
    # Who knows the order and all other records sees one Gaussian release of a record.
    return float(fastdp.accounting.epsilon(GaussianDpEvent(2.0), 1e-5)) / private.epsilon()


# Tokenizers.


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(40)), "alice", "hiv"]
    plain = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")


def _table() -> torch.Tensor:
    return torch.randn(44, 16, generator=torch.Generator().manual_seed(0))


def _encode_with_special(tokenizer: Any, texts: Any, *_: Any, **options: Any) -> Any:
    """As most encoders do, which leave special tokens as they are."""
    ids = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    marks = [[int(token in tokenizer.all_special_ids) for token in own] for own in ids]
    return {"input_ids": ids, "special_tokens_mask": marks}


@attack(
    "Words that a tokenizer calls special leave a perturbation of tokens unchanged.",
    off={"fastdp.methods.sap.privatizer.encode_private": _encode_with_special},
)
def words_called_special(library: Library) -> float:
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"cls_token": "alice", "sep_token": "hiv"})
    # With this much noise a token stays itself once in forty times.
    privatizer = fastdp.TextPrivatizer(_table(), eta=0.01, tokenizer=tokenizer, mechanism="exponential")
    return unless(sum("alice" in privatizer("w1 alice w2 hiv") for _ in range(20)) <= 12)


# Processes and networks.


@attack(
    "Each of two processes without a group draws its own noise and counts its own steps.",
    off={"fastdp.builder.check_model": nothing},
)
def several_processes(library: Library) -> float:
    with unittest.mock.patch.dict(os.environ, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}):
        library.start(Task(Net), records())
    return 2.0


@attack(
    "A federation's server asks for no perturbation, and a client with stricter settings sends none.",
    off={"fastdp.federated.policy.NodePolicy.tighten": lambda own, found: found},
)
def server_says_none(library: Library) -> float:
    from fastdp.federated.policy import client_settings

    run = {"model": "m", "output": "o", "eval": "e", "perturbation": "none", "epsilon": 1000.0}
    own = {
        "model": str(Path(__file__).parent),
        "train": "own.csv",
        "state": "kept",
        "perturbation": "all",
        "epsilon": 1.0,
        "dpsgd-epsilon": 1.0,
    }
    found = client_settings(run, own)
    return unless(found.perturbation == "all" and found.epsilon <= 1.0 and (found.dpsgd_epsilon or math.inf) <= 1.0)
