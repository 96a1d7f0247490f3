"""Which parameters belong together."""

import pytest
import torch
from torch import nn

from fastdp.methods.frost import split
from tests.cases import cases
from tests.engine import models


def test_a_weight_with_its_bias():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
    found = split(dict(model.named_parameters()))
    assert [(p.name, p.parameters, p.size) for p in found] == [
        ("0", ("0.weight", "0.bias"), 16),
        ("1", ("1.weight", "1.bias"), 8),
        ("2", ("2.weight",), 8),
    ]
    attention = {p.name: p.parameters for p in split(dict(nn.MultiheadAttention(4, 2).named_parameters()))}
    assert attention["in_proj_weight"] == ("in_proj_weight", "in_proj_bias")
    assert attention["out_proj"] == ("out_proj.weight", "out_proj.bias")


@cases("name", ["gpt2", "bert", "vit", "llama", "t5"])
def test_partitions_are_disjoint_and_cover_every_model(name):
    parameters = dict(models.build(name).named_parameters())
    found = split(parameters)
    assert sorted(n for p in found for n in p.parameters) == sorted(parameters)
    assert sum(p.size for p in found) == sum(p.numel() for p in parameters.values())
    assert all(len(p.parameters) <= 2 for p in found)
    assert len({p.name for p in found}) == len(found)


PARAMETERS = {"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(2), "b.weight": torch.zeros(3)}


def test_partitions_of_a_users_own():
    found = split(PARAMETERS, {"biases": ["*bias"], "rest": ["*weight"]})
    assert [(p.name, p.parameters, p.size) for p in found] == [
        ("biases", ("a.bias",), 2),
        ("rest", ("a.weight", "b.weight"), 7),
    ]
    assert [p.size for p in split(PARAMETERS, [["a.*"], ["b.*"]])] == [6, 3]


@cases(
    ("declared", "message"),
    [
        ({"a": ["a.*"], "again": ["a.weight", "b.*"]}, "a.weight is listed twice, in partition 'a' and in 'again'"),
        ([["a.*"], ["a.*"], ["b.*"]], "a.weight is listed twice"),
        ({"a": ["a.weight", "a.weight"]}, "listed twice"),
        ({"a": ["a.*"]}, "do not cover the trained parameter b.weight"),
        ({"a": ["a.*", "b.*"], "c": ["c.*"]}, "'c.\\*', which is no trained parameter"),
        ({"a": "a.*"}, "give a list"),
    ],
)
def test_refuses_partitions_that_do_not_fit(declared, message):
    with pytest.raises(ValueError, match=message):
        split(PARAMETERS, declared)
