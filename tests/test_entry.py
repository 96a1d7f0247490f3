"""Arguments of wrong types or values, of every public entry: one sentence in the caller's own terms, before anything is spent."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

import fastdp
from fastdp import accounting
from fastdp.methods.ewft.releases import EWFTSettings
from fastdp.methods.sap import split_model
from tests.cases import cases
from tests.engine.runs import Classifier, loader

TABLE = torch.randn(50, 8)
VOTES = {"rounds": 1, "target_epsilon": 1.0, "target_delta": 1e-3}
#: Entries as a caller finds them who knows no types.
any_make_private = fastdp.make_private
DPSGD = fastdp.DPSGD
DPZO = fastdp.DPZO
EWFT = EWFTSettings
Privatizer = fastdp.TextPrivatizer
Votes = fastdp.PrivateVotes


def private(optimizer=None, model=None, lr=0.1, **options):
    model = Classifier() if model is None else model
    optimizer = torch.optim.SGD(Classifier().parameters() if isinstance(model, str) else model.parameters(), lr=lr)
    return fastdp.make_private(model, optimizer, loader(), **{"noise_multiplier": 1.0, "epochs": 1} | options)


def event(noise):
    return accounting.dpsgd(noise, 0.25, 8)


#: Options of `make_private`, and what it says of them.
OPTIONS = [
    ({"epochs": "3"}, "epochs is '3': give a number"),
    ({"noise_multiplier": "1"}, "noise_multiplier is '1': give a number"),
    ({"target_delta": "1e-3"}, "target_delta is '1e-3': give a number"),
    ({"noise_multiplier": None, "target_epsilon": "8", "target_delta": 1e-3}, "target_epsilon is '8': give a number"),
    ({"max_physical_batch_size": 0}, "max_physical_batch_size is 0: give a whole number of at least 1"),
    ({"max_physical_batch_size": 2.5}, "max_physical_batch_size is 2.5: give a whole number"),
    ({"unsafe_seed": "a"}, "unsafe_seed is 'a': give a whole number"),
    ({"max_examples_per_user": 2}, "no user is known: give user_ids as well"),
    ({"user_ids": "patient", "max_examples_per_user": 2}, "user_ids is the text 'patient': give a list"),
    ({"user_ids": [[i] for i in range(24)], "max_examples_per_user": 2}, "user_ids has a list at example 0"),
    ({"user_ids": torch.zeros(24, 2), "max_examples_per_user": 2}, "user_ids has a Tensor at example 0"),
    ({"user_ids": np.zeros((24, 2)), "max_examples_per_user": 2}, "user_ids has a ndarray at example 0"),
    ({"unit_map": True}, "unit_map is of type bool: give the name of a batch entry"),
    ({"criterion": "mse"}, r"criterion is of type str: give a function of \(output, batch\)"),
    ({"output_dir": 3}, "output_dir is of type int: give the path of a folder"),
    ({"method": fastdp.DPSGD}, r"method is the class DPSGD.*: give fastdp.DPSGD\(\)"),
    ({"model": "gpt2"}, "model is of type str: give the torch.nn.Module"),
    ({"lr": math.nan}, "The optimizer's lr is nan: give it a finite one"),
]
#: Calls of other entries.
CALLS = [
    (
        lambda: any_make_private(Classifier(), torch.optim.SGD, loader(), epochs=1),
        "optimizer is the class SGD: give one",
    ),
    (lambda: private().extend("1"), "epochs is '1': give a number"),
    (lambda: private().extend(math.inf), "extend by a positive number"),
    (lambda: private().load_state_dict(None), r"state is None: give what state_dict\(\) returned"),
    (lambda: DPSGD(noise_schedule="x"), "noise_schedule is 'x': give factors"),
    (lambda: DPSGD(adaptive=3), "adaptive is of type int: give fastdp.AdaptiveClipping"),
    (lambda: DPZO(seed="x"), "seed is 'x': give a whole number"),
    (
        lambda: EWFT(layer=1, noise=1.0, sequence_length=8, dataset_size=32),
        "noise is of type float: give a NoiseSchedule",
    ),
    (lambda: Privatizer([[1.0]], eta=3.0), r"table_or_model is of type list: give a tensor \[V, d\]"),
    (lambda: Privatizer(TABLE, eta=3.0, tokenizer="bert"), "tokenizer is the text 'bert'"),
    (lambda: split_model(torch.nn.Linear(2, 2)), "The blocks of a Linear model are not known"),
    (lambda: Votes("abc", len, **VOTES), "texts is one text: give a list"),
    (lambda: Votes(["abc"], len, **VOTES | {"rounds": 1.5}), "rounds is 1.5: give a whole number of at least 1"),
    (lambda: Votes(["abc"], None, **VOTES), "embed is None: give a function"),
    (lambda: Votes(["abc"], lambda texts: [[1.0]], **VOTES), "what_embed_returned is of type list: give a tensor"),
    (lambda: accounting.calibrate(event(1.0), 8.0, 1e-5), "event_fn is .*: give a function"),
    (lambda: accounting.calibrate(event, "8", 1e-5), "epsilon is '8': give a number"),
    (lambda: accounting.epsilon(event(1.0), "x"), "delta is 'x': give a number"),
    (lambda: event("1"), "noise_multiplier is '1': give a number"),
    (lambda: accounting.dpsgd(1.0, "a", 8), "sample_rate is 'a': give a number"),
]


@cases("call, said", [*((partial(private, **options), said) for options, said in OPTIONS), *CALLS])
def test_one_sentence_says_what_to_give(call, said):
    with pytest.raises((ValueError, TypeError), match=said) as caught:
        call()
    assert len(str(caught.value).split()) <= 25


def test_a_trainer_says_it_of_its_own_arguments(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[])
    with pytest.raises(TypeError, match="privacy is of type dict: give fastdp.PrivacyArguments"):
        fastdp.DPTrainer(Classifier(), arguments, privacy={"target_epsilon": 8})


@pytest.mark.parametrize("epsilon", [1e-9, 1e-7, 1e-5])
def test_a_budget_that_delta_alone_nearly_covers(epsilon):
    noise = accounting.calibrate(event, epsilon, 1e-3)
    assert accounting.epsilon(event(noise), 1e-3) <= epsilon
    assert accounting.epsilon(event(0.9 * noise), 1e-3) > epsilon
