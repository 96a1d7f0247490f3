"""Every form of every suite is one that `fastdp finetune` takes."""

import math
from pathlib import Path

import pytest
from fastdp.bench.utility.methods import SIZES, SUITES, settings, with_public

from fastdp.commands.bench import SUITES as NAMES, suite_of
from fastdp.finetune.config import load_config
from fastdp.finetune.methods import check_method
from fastdp.finetune.perturbations import choose_perturbation


def test_the_command_knows_every_suite():
    assert {*SUITES, "federated"} == {*NAMES}
    with pytest.raises(ValueError, match="choose one of"):
        suite_of("pure")


@pytest.mark.parametrize("name", SUITES)
def test_every_form_is_taken_by_the_checks_of_a_run(name):
    suite = SUITES[name]
    files = {"model": "model", "train": "train.csv", "eval": "eval.csv", "output": "run"}
    for row in settings(suite, 1):
        epsilon = None if row["epsilon"] == "nan" else float(row["epsilon"])
        own = with_public(suite.forms[row["form"]], Path("public.csv"))
        config = load_config(None, {**suite.shared, **files, **own, "epsilon": epsilon})
        config.check()
        check_method(config)
        choose_perturbation(config)
        assert "PUBLIC" not in str(config)


def test_epsilons_are_those_of_the_suite_or_the_form():
    rows = list(settings(SUITES["frost"], 1))
    assert {row["epsilon"] for row in rows if row["form"] == "DP-FROST"} == {"0.5", "2.0", "8.0"}
    assert [row["epsilon"] for row in rows if row["form"] == "non-private"] == [str(math.inf)]
    assert SIZES["tiny"].train == 256
