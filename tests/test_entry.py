"""Arguments of wrong types or values, of every public entry: one sentence in the caller's own terms, before anything is spent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

import fastdp
from fastdp import accounting
from fastdp.methods.ewft.releases import EWFTSettings
from fastdp.methods.sap import split_model
from tests.engine.runs import Classifier, loader

TABLE = torch.randn(50, 8)
VOTES: dict[str, Any] = {"rounds": 1, "target_epsilon": 1.0, "target_delta": 1e-3}


def private(optimizer: Any = None, model: Any = None, lr: float = 0.1, **options: Any) -> Any:
    model = Classifier() if model is None else model
    optimizer = torch.optim.SGD(Classifier().parameters() if isinstance(model, str) else model.parameters(), lr=lr)
    return fastdp.make_private(model, optimizer, loader(), **{"noise_multiplier": 1.0, "epochs": 1} | options)


def event(noise: float) -> Any:
    return accounting.dpsgd(noise, 0.25, 8)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "epochs": (lambda: private(epochs="3"), "epochs is '3': give a number"),
    "noise": (lambda: private(noise_multiplier="1"), "noise_multiplier is '1': give a number"),
    "delta": (lambda: private(target_delta="1e-3"), "target_delta is '1e-3': give a number"),
    "target": (
        lambda: private(noise_multiplier=None, target_epsilon="8", target_delta=1e-3),
        "target_epsilon is '8': give a number",
    ),
    "no rows": (
        lambda: private(max_physical_batch_size=0),
        "max_physical_batch_size is 0: give a whole number of at least 1",
    ),
    "half a row": (lambda: private(max_physical_batch_size=2.5), "max_physical_batch_size is 2.5: give a whole number"),
    "seed": (lambda: private(unsafe_seed="a"), "unsafe_seed is 'a': give a whole number"),
    "users left out": (lambda: private(max_examples_per_user=2), "no user is known: give user_ids as well"),
    "users by name": (
        lambda: private(user_ids="patient", max_examples_per_user=2),
        "user_ids is the text 'patient': give a list",
    ),
    "users in lists": (
        lambda: private(user_ids=[[i] for i in range(24)], max_examples_per_user=2),
        "user_ids has a list at example 0: give text or a number",
    ),
    "users in rows": (
        lambda: private(user_ids=torch.zeros(24, 2), max_examples_per_user=2),
        "user_ids has a Tensor at example 0",
    ),
    "users in arrays": (
        lambda: private(user_ids=np.zeros((24, 2)), max_examples_per_user=2),
        "user_ids has a ndarray at example 0",
    ),
    "unit map": (lambda: private(unit_map=True), "unit_map is of type bool: give the name of a batch entry"),
    "criterion": (lambda: private(criterion="mse"), r"criterion is of type str: give a function of \(output, batch\)"),
    "folder": (lambda: private(output_dir=3), "output_dir is of type int: give the path of a folder"),
    "method": (lambda: private(method=fastdp.DPSGD), r"method is the class DPSGD.*: give fastdp.DPSGD\(\)"),
    "model": (lambda: private(model="gpt2"), "model is of type str: give the torch.nn.Module"),
    "optimizer": (
        lambda: fastdp.make_private(Classifier(), torch.optim.SGD, loader(), noise_multiplier=1.0, epochs=1),  # type: ignore[arg-type]
        "optimizer is the class SGD: give a torch.optim.Optimizer",
    ),
    "learning rate": (lambda: private(lr=math.nan), "The optimizer's lr is nan: give it a finite one"),
    "extend": (lambda: private().extend("1"), "epochs is '1': give a number"),
    "extend for ever": (lambda: private().extend(math.inf), "extend by a positive number"),
    "state": (lambda: private().load_state_dict(None), r"state is None: give what state_dict\(\) returned"),
    "schedule": (lambda: fastdp.DPSGD(noise_schedule="x"), "noise_schedule is 'x': give factors"),  # type: ignore[arg-type]
    "adaptive": (lambda: fastdp.DPSGD(adaptive=3), "adaptive is of type int: give fastdp.AdaptiveClipping"),  # type: ignore[arg-type]
    "directions": (lambda: fastdp.DPZO(seed="x"), "seed is 'x': give a whole number"),  # type: ignore[arg-type]
    "noise of EW-FT": (
        lambda: EWFTSettings(layer=1, noise=1.0, sequence_length=8, dataset_size=32),  # type: ignore[arg-type]
        "noise is of type float: give a NoiseSchedule",
    ),
    "table": (
        lambda: fastdp.TextPrivatizer([[1.0]], eta=3.0),
        r"table_or_model is of type list: give a tensor \[V, d\]",
    ),  # type: ignore[arg-type]
    "tokenizer": (lambda: fastdp.TextPrivatizer(TABLE, eta=3.0, tokenizer="bert"), "tokenizer is the text 'bert'"),  # type: ignore[arg-type]
    "blocks": (lambda: split_model(torch.nn.Linear(2, 2)), "The blocks of a Linear model are not known"),
    "one text": (lambda: fastdp.PrivateVotes("abc", len, **VOTES), "texts is one text: give a list"),  # type: ignore[arg-type]
    "half a round": (
        lambda: fastdp.PrivateVotes(["abc"], len, **VOTES | {"rounds": 1.5}),  # type: ignore[arg-type]
        "rounds is 1.5: give a whole number of at least 1",
    ),
    "no embedding": (lambda: fastdp.PrivateVotes(["abc"], None, **VOTES), "embed is None: give a function"),  # type: ignore[arg-type]
    "embedding": (
        lambda: fastdp.PrivateVotes(["abc"], lambda texts: [[1.0]], **VOTES),  # type: ignore[arg-type, return-value]
        "what_embed_returned is of type list: give a tensor",
    ),
    "calibrate an event": (lambda: accounting.calibrate(event(1.0), 8.0, 1e-5), "event_fn is .*: give a function"),
    "calibrate for text": (lambda: accounting.calibrate(event, "8", 1e-5), "epsilon is '8': give a number"),  # type: ignore[arg-type]
    "delta of an event": (lambda: accounting.epsilon(event(1.0), "x"), "delta is 'x': give a number"),  # type: ignore[arg-type]
    "noise of an event": (lambda: event("1"), "noise_multiplier is '1': give a number"),  # type: ignore[arg-type]
    "rate of an event": (lambda: accounting.dpsgd(1.0, "a", 8), "sample_rate is 'a': give a number"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_says_what_to_give(name: str) -> None:
    call, said = CASES[name]
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        call()
    assert len(str(caught.value).split()) <= 25


def test_a_trainer_says_it_of_its_own_arguments(tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    with pytest.raises(TypeError, match="privacy is of type dict: give fastdp.PrivacyArguments"):
        fastdp.DPTrainer(Classifier(), arguments, privacy={"target_epsilon": 8})  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [1e-9, 1e-7, 1e-5])
def test_a_budget_that_delta_alone_nearly_covers(epsilon: float) -> None:
    noise = accounting.calibrate(event, epsilon, 1e-3)
    assert accounting.epsilon(event(noise), 1e-3) <= epsilon
    assert accounting.epsilon(event(0.9 * noise), 1e-3) > epsilon
