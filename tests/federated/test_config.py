"""Settings of a run: what is accepted and refused."""

import dataclasses

import pytest

from fastdp.federated import FederatedConfig
from fastdp.federated.bundle import app_folder
from fastdp.federated.config import MAY_CHANGE
from tests.cases import cases

NEEDED = {"model": "m", "output": "o", "eval": "e"}


def test_reads_flowers_run_config():
    config = FederatedConfig.read({"model": "m", "output": "o", "eval": "e", "max-update-norm": 7, "min-clients": 3})
    assert config.max_update_norm == 7.0
    assert config.min_clients == 3


@cases(
    ("settings", "message"),
    [
        ({"epsilom": 1.0}, "unknown setting 'epsilom'; did you mean epsilon"),
        ({"rounds": "three"}, "rounds must be a whole number"),
        ({"model": "m\x1b[2J\nINFO : round 1"}, r"model is 'm\\x1b\[2J\\nINFO : round 1': write one line"),
        ({"model": "m" * 5000}, "at most 4096 characters"),
        ({"rounds": True}, "rounds must be a whole number"),
        ({"model": ""}, "model is missing"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"aggregation": "median"}, "aggregation is 'median'"),
        ({"client-clip": 1.0}, "go together"),
        ({"client-clip": 1.0, "client-noise-multiplier": 1.0, "aggregation": "examples"}, "cannot weight"),
        ({"evaluation": "clients"}, "evaluation at clients was removed.*use server"),
        ({"partition": "source"}, "partition is 'source': it must be one of iid, own"),
        ({"eval": ""}, "needs eval"),
        # A client would make what the server asks for.
        ({"bottleneck-size": 10**9}, "bottleneck_size is 1000000000"),
        ({"threads": 10**6}, "threads is 1000000"),
        ({"local-epochs": 10**9}, "local_epochs is 1000000000"),
        ({"rounds": 10**9}, "rounds is 1000000000"),
        ({"lora-r": 10**4}, "lora_r is 10000"),
    ],
)
def test_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FederatedConfig.read(NEEDED | settings)


def test_the_app_lists_every_setting_with_its_default():
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    path = app_folder() / "pyproject.toml"
    written = tomllib.loads(path.read_text())["tool"]["flwr"]["app"]["config"]
    expected = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(FederatedConfig)}
    assert written == expected


def test_what_a_resumed_run_may_change_are_settings():
    assert set(MAY_CHANGE) <= set(FederatedConfig.read(NEEDED).as_dict())
