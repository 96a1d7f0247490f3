"""Settings and forms that were removed say what replaces them; those of the last release are replaced with a warning."""

import pytest
import torch

import fastdp
import fastdp.audit
from fastdp.methods import ewft, rapft
from fastdp.methods.rapft import Initialisation, NoisyMap, Propagation, RapFT
from fastdp.methods.removed import REMOVED_NAMES, SUBSTITUTES
from fastdp.methods.sap import CTI
from tests.cases import cases

COUNTED = {"importance": torch.zeros(2, 3), "supported": torch.ones(3, dtype=torch.bool), "source": "public"}
MAP = {"source": NoisyMap(1.0, 0.1)}


@cases(
    ("make", "given", "same"),
    [
        *(
            (RapFT, {**MAP, **old}, MAP)
            for old in ({"bounds": (1.0, 2.0)}, {"weights": (1.0, 4.0)}, {"ranking": "map"})
        ),
        (Initialisation, {"kind": "top_p", "p": 0.5}, {"p": 0.5}),
        (Propagation, {"rule": "epsilon"}, {}),
        *(
            (fastdp.DPFrost, old, {})
            for old in ({"magnitude": "MG"}, {"axes_power": 0.25}, {"granularity": "parameters"})
        ),
        (fastdp.DPFrost, {"choose_by": "values"}, {"choose_by": "random"}),
        *(
            (fastdp.SelectivePerturbation, {"epsilon": 1.0, **old}, {"epsilon": 1.0})
            for old in ({"mechanism": "partition"}, {"cells": 8})
        ),
        (CTI, {**COUNTED, "form": "elastic"}, {**COUNTED, "form": "prior"}),
    ],
)
def test_a_setting_of_the_last_release_is_replaced_with_a_warning(make, given, same):
    with pytest.warns(FutureWarning, match=rf"{make.__name__}\.\w+(=\w+)? was removed: "):
        found = make(**given)
    assert vars(found) == vars(make(**same))


def test_a_form_without_a_substitute_is_refused_by_name_and_by_position():
    with pytest.raises(ValueError, match="allocation=ellipsoid was removed: use allocation='optimal'"):
        RapFT(NoisyMap(1.0, 0.1), allocation="ellipsoid")
    with pytest.raises(ValueError, match="mechanism=metric was removed: use 'local', or TextPrivatizer"):
        fastdp.SelectivePerturbation(1.0, "metric")
    with pytest.raises(TypeError):
        RapFT(NoisyMap(1.0, 0.1), another=1)


@cases("key", [key for key in REMOVED_NAMES if key[0].islower()])
def test_a_removed_name_of_a_package_says_what_to_use(key):
    package, _, name = key.partition(".")
    with pytest.raises(AttributeError, match=f"{key} was removed: use "):
        getattr({"audit": fastdp.audit, "ewft": ewft, "rapft": rapft}[package], name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ewft.nothing


def test_sentences_are_short_and_substitutes_are_of_removed_settings():
    assert SUBSTITUTES.keys() <= REMOVED_NAMES.keys()
    assert max(len(f"{key} was removed: {text}".split()) for key, text in REMOVED_NAMES.items()) <= 25
