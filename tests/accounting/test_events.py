"""Events: builders, the event of n releases, the flat form, and their JSON."""

import json
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given, settings, strategies as st

from fastdp import accounting
from fastdp.accounting.events import Flat, flatten
from fastdp.accounting.serialisation import canonical
from tests.cases import cases

_numbers = st.floats(min_value=1e-6, max_value=1e6)
_leaves = st.one_of(
    st.builds(accounting.gaussian, _numbers),
    st.builds(accounting.poisson_gaussian, _numbers, st.floats(min_value=1e-9, max_value=1.0)),
    st.just(dp_event.NoOpDpEvent()),
    st.just(dp_event.NonPrivateDpEvent()),
)
_events = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.builds(dp_event.SelfComposedDpEvent, inner, st.integers(0, 10**6)),
        st.builds(dp_event.ComposedDpEvent, st.lists(inner, max_size=3)),
    ),
    max_leaves=6,
)


def test_poisson_steps_are_composed_one_by_one():
    event = accounting.dpsgd(noise_multiplier=0.5, sample_rate=0.01, steps=7)
    assert event == dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(0.5)), 7)


@cases(("steps", "epochs"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_shuffled_epochs_count_whole_and_are_not_amplified(steps, epochs):
    event = accounting.dpsgd(0.7, 0.1, steps, sampling="shuffled", steps_per_epoch=10)
    assert flatten(event) == Flat((), pytest.approx(epochs / 0.7**2))


def test_no_releases_are_no_event():
    assert accounting.dpsgd(0.5, 0.01, 0) == dp_event.NoOpDpEvent()
    assert accounting.compose(accounting.dpsgd(0.5, 0.01, 0)) == dp_event.NoOpDpEvent()
    assert flatten(dp_event.SelfComposedDpEvent(accounting.gaussian(1.0), 0)).empty


def test_equal_releases_merge_wherever_they_stand():
    step = accounting.poisson_gaussian(0.5, 0.01)
    event = accounting.compose(
        dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([step, accounting.gaussian(2.0)]), 3),
        accounting.poisson_gaussian(0.5, 0.01),
        accounting.poisson_gaussian(4.0, 1.0),
    )
    assert flatten(event) == Flat(((0.01, 0.5, 4),), pytest.approx(3 / 4 + 1 / 16))


def test_releases_of_one_sample_are_one_release_of_it():
    """A gradient and the count of adaptive clipping share their sample (Andrew et al. 2021, Theorem 1)."""
    pair = dp_event.PoissonSampledDpEvent(
        0.01, dp_event.ComposedDpEvent([accounting.gaussian(0.9), accounting.gaussian(20.0)])
    )
    ((rate, multiplier, count),) = flatten(pair).sampled
    assert (rate, count) == (0.01, 1)
    assert multiplier == pytest.approx((0.9**-2 + 20.0**-2) ** -0.5)


@cases(
    "event",
    [
        dp_event.NonPrivateDpEvent(),
        accounting.gaussian(0.0),
        accounting.dpsgd(0.0, 0.01, 5),
        dp_event.PoissonSampledDpEvent(0.01, dp_event.NonPrivateDpEvent()),
        accounting.compose(accounting.gaussian(1.0), dp_event.NonPrivateDpEvent()),
    ],
)
def test_releases_without_noise_are_not_private(event):
    assert not flatten(event).private


def test_numpy_integers_become_python_integers():
    event = accounting.dpsgd(np.float32(0.5), np.float64(0.01), np.int64(7))
    assert type(event.count) is int
    assert type(flatten(dp_event.SelfComposedDpEvent(accounting.gaussian(1.0), np.int32(3))).mu_squared) is float


@cases(
    ("arguments", "match"),
    [
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.01}, "sample_rate"),
        ({"sample_rate": math.nan}, "sample_rate"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"steps": -1}, "number of releases"),
        ({"steps": 2.5}, "whole number"),
        ({"sampling": "sequential"}, "sampling"),
        ({"sampling": "shuffled"}, "steps_per_epoch"),
        ({"sampling": "shuffled", "steps_per_epoch": 0}, "steps_per_epoch"),
    ],
)
def test_values_out_of_range_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        accounting.dpsgd(**{"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 5, **arguments})


@cases(
    "event",
    [
        dp_event.LaplaceDpEvent(1.0),
        dp_event.UnsupportedDpEvent(),
        dp_event.SampledWithoutReplacementDpEvent(100, 10, accounting.gaussian(1.0)),
    ],
)
def test_other_kinds_are_refused_by_name(event):
    with pytest.raises(ValueError, match=type(event).__name__):
        flatten(event)
    with pytest.raises(ValueError, match=type(event).__name__):
        accounting.serialise(event)


def test_a_sample_of_a_sample_is_refused():
    with pytest.raises(ValueError, match="sample of a Poisson sample"):
        flatten(dp_event.PoissonSampledDpEvent(0.1, accounting.poisson_gaussian(1.0, 0.1)))


@given(_events)
@settings(max_examples=100)
def test_serialisation_round_trip(event):
    document = accounting.serialise(event)
    text = canonical(document)
    assert accounting.deserialise(text) == event
    assert accounting.deserialise(json.loads(text)) == event
    assert canonical(accounting.serialise(accounting.deserialise(text))) == text


def test_the_serialised_form_is_fixed():
    """Cards of past runs must stay readable: change the version if this changes."""
    text = canonical(accounting.serialise(accounting.dpsgd(0.5, 0.25, 3)))
    assert text == (
        '{"event":{"count":3,"event":{"event":{"kind":"gaussian","noise_multiplier":0.5},"kind":"poisson_sampled",'
        '"sampling_probability":0.25},"kind":"self_composed"},"format":"fastdp.event","version":1}'
    )


def _document(event):
    return {"format": "fastdp.event", "version": 1, "event": event}


def _nested(depth):
    node = {"kind": "no_op"}
    for _ in range(depth):
        node = {"kind": "self_composed", "count": 1, "event": node}
    return node


@cases(
    ("document", "match"),
    [
        ("{", "not JSON"),
        ([], "not a serialised event"),
        ({**_document({"kind": "no_op"}), "format": "other"}, "not a serialised event"),
        ({**_document({"kind": "no_op"}), "version": 2}, "version 2"),
        ({**_document({"kind": "no_op"}), "more": 1}, "fields besides"),
        (_document({"kind": "laplace", "noise_multiplier": 1.0}), "laplace"),
        (_document({"kind": ["gaussian"]}), "not a kind"),
        (_document(3), "not a kind"),
        (_document({"kind": "gaussian"}), "exactly these fields"),
        (_document({"kind": "gaussian", "noise_multiplier": 1.0, "more": 1}), "exactly these fields"),
        (_document({"kind": "gaussian", "noise_multiplier": "1"}), "must be a number"),
        (_document({"kind": "gaussian", "noise_multiplier": True}), "must be a number"),
        (_document({"kind": "gaussian", "noise_multiplier": -1}), "0 or more"),
        (_document({"kind": "poisson_sampled", "sampling_probability": 2, "event": {"kind": "no_op"}}), r"\[0, 1\]"),
        (_document({"kind": "self_composed", "count": 1.0, "event": {"kind": "no_op"}}), "whole number"),
        (_document({"kind": "self_composed", "count": -1, "event": {"kind": "no_op"}}), "0 or more"),
        (_document({"kind": "composed", "events": {}}), "must be a list"),
        (_document(_nested(40)), "nested"),
    ],
)
def test_malformed_documents_are_refused(document, match):
    with pytest.raises(ValueError, match=match):
        accounting.deserialise(document)
