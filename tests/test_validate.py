"""Numbers that are refused are named, in one sentence."""

import pytest
import torch

from fastdp.validate import (
    at_least,
    fraction,
    host_and_port,
    instance,
    integer,
    number,
    one_of,
    positive,
    rate,
    usable_device,
)
from tests.cases import cases


@cases("value", [-1.0, float("nan"), float("inf"), "1", None])
def test_what_is_no_number_or_too_small_is_refused_by_name(value):
    with pytest.raises(ValueError, match="share must be a finite number of at least 0"):
        at_least(0.0, delta=1.0, share=value)
    for check in (positive, fraction, rate):
        with pytest.raises(ValueError, match=rf"share is {value!r}: (it must|give a number)"):
            check(delta=0.5, share=value)


def test_ends_of_ranges():
    at_least(0.0, share=0)
    positive(share=1, delta=1e-300)
    rate(share=1)
    for check, value in ((positive, 0.0), (positive, True), (fraction, 0), (fraction, 1.0), (rate, 0.0), (rate, 1.1)):
        with pytest.raises(ValueError, match=f"share is {value}: (it must|give a number)"):
            check(delta=0.5, share=value)


def test_types_are_refused_by_name():
    number(share=None, other=1.5)
    integer(1, share=None, other=3)
    instance(int | None, "a count", share=None, other=3)
    for value in ("1", True, [1.0]):
        with pytest.raises(ValueError, match="share is .*: give a number"):
            number(other=1.0, share=value)
    for value in ("1", True, 2.5, 0):
        with pytest.raises(ValueError, match="share is .*: give a whole number of at least 1"):
            integer(1, other=1, share=value)
    for value, said in ((None, "None"), ("1", "of type str"), (int, "the class int")):
        with pytest.raises(TypeError, match=f"share is {said}: give a count"):
            instance(int, "a count", other=1, share=value)


def test_a_choice_is_refused_with_the_others():
    one_of(("mean", "sum"), reduction="sum")
    with pytest.raises(ValueError, match="reduction is 'none': choose 'mean' or 'sum'"):
        one_of(("mean", "sum"), reduction="none")


@pytest.mark.parametrize(("gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_device_is_a_gpu_where_there_is_one(monkeypatch, gpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert usable_device("auto") == torch.device(device)
    assert usable_device("cpu") == torch.device("cpu")


def test_ports_end_at_65535():
    assert host_and_port("[::1]:65535") == ("::1", 65535)
    for address in ("localhost:65536", "localhost:-1", "localhost:", ":80"):
        with pytest.raises(ValueError, match="is no address"):
            host_and_port(address)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="device nowhere cannot be used"):
        usable_device("nowhere")
