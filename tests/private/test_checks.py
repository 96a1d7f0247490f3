"""Data sets in which one example stands in several places."""

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset
from transformers import (
    AutoformerConfig,
    AutoformerForPrediction,
    TimeSeriesTransformerConfig,
    TimeSeriesTransformerForPrediction as TimeSeries,
)

import fastdp
from fastdp.private.checks import refuse_repeats
from fastdp.private.sampler import Units
from tests.cases import cases
from tests.engine.runs import PRIVATE, examples, loader, start


def _table(data: list[dict[str, Any]]) -> Any:
    return datasets.Dataset.from_list([{"x": row["x"].tolist()} for row in data])


@cases(
    "pick",
    [
        lambda data: Subset(data, [0, 1, 2, 1]),
        lambda data: ConcatDataset([data, data]),
        lambda data: _table(data).select([0, 1, 2, 1]),
        lambda data: ConcatDataset([_table(data)] * 2),
        lambda data: ConcatDataset([Subset(data, [3, 4]), Subset(Subset(data, [5, 6]), [-2]), Subset(data, [-19])]),
    ],
)
def test_an_example_that_would_be_two_units_is_refused(pick: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="are the same one. Leave repeats out"):
        start(data_loader=loader(pick(examples(24)), batch_size=2))


def test_repeats_within_a_users_rows_and_beyond_their_limit_are_taken() -> None:
    data = Subset(examples(24), [0, 0, 1, 2, 2])
    users = ["a", "a", "a", "b", "c"]
    with pytest.raises(ValueError, match="Examples 3 and 4 of the data set are the same one"):
        start(data_loader=loader(data, batch_size=2), user_ids=users, max_examples_per_user=3)
    users[-1] = "b"
    for most in (3, 1):
        start(data_loader=loader(data, batch_size=2), user_ids=users, max_examples_per_user=most).detach()
    parts = ConcatDataset([Subset(examples(24), [0, 1]), Subset(examples(24, seed=1), [0, 1])])
    assert len(start(data_loader=loader(parts, batch_size=2)).data_loader.units) == 4


def test_rows_that_are_picked_once_are_taken() -> None:
    table = _table(examples(24)).with_format("torch")
    apart = ConcatDataset([table.select([3, 1]), table.select([0, 2])])
    for data in (table, table.shuffle(seed=0), apart):
        refuse_repeats(data, Units(len(data)))


@cases(
    "config, kind, scale, words",
    [
        (TimeSeriesTransformerConfig, TimeSeries, None, "set model.model.scaler.default_scale = 1.0"),
        (AutoformerConfig, AutoformerForPrediction, 1.0, "chooses delays by a mean over the batch"),
    ],
)
def test_forecasters_that_couple_series_are_refused_by_name(config: Any, kind: Any, scale: Any, words: str) -> None:
    sizes: dict[str, Any] = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "lags_sequence": [1, 2]}
    model = kind(config(prediction_length=2, context_length=6, num_time_features=1, **sizes))
    model.model.scaler.default_scale = scale
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=words):
        fastdp.make_private(model, optimizer, loader(examples(24)), epochs=1, **PRIVATE)
