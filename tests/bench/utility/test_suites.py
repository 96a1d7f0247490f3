"""The command knows every suite there is."""

import importlib
import pkgutil

import pytest

pytest.importorskip("matplotlib")

from fastdp.bench import utility

from fastdp.commands.bench import SUITES


def test_each_module_that_measures_is_a_suite_and_the_other_way_round():
    modules = {
        name: importlib.import_module(f"{utility.__name__}.{name}")
        for _, name, _ in pkgutil.iter_modules(utility.__path__)
    }
    assert {name for name, module in modules.items() if hasattr(module, "settings")} == set(SUITES)
    assert all(callable(modules[name].main) for name in SUITES)
