"""Settings and forms that were removed say what replaces them; those of the last release are replaced with a warning."""

import pytest
import torch

import fastdp
from fastdp.methods import ewft, rapft, selective
from fastdp.methods.rapft import Initialisation, NoisyMap, PublicGradients, RapFT
from fastdp.methods.removed import REMOVED_NAMES, SUBSTITUTES
from fastdp.methods.sap import CTI, SAPPerturbation
from tests.cases import cases

COUNTED = {"importance": torch.zeros(2, 3), "supported": torch.ones(3, dtype=torch.bool), "source": "public"}
AXES = {"source": PublicGradients([{}]), "allocation": "axes"}


@cases(
    ("make", "given", "same"),
    [
        (RapFT, {"source": NoisyMap(1.0, 0.1), "bounds": (1.0, 2.0)}, {"source": NoisyMap(1.0, 0.1)}),
        (RapFT, {"source": NoisyMap(1.0, 0.1), "weights": (1.0, 4.0)}, {"source": NoisyMap(1.0, 0.1)}),
        (RapFT, {"source": NoisyMap(1.0, 0.1), "magnitude": True}, {"source": NoisyMap(1.0, 0.1)}),
        (RapFT, {**AXES, "axes_power": None}, {**AXES, "axes_power": 0.5}),
        (fastdp.DPFrost, {"norm_order": 2}, {}),
        (fastdp.DPFrost, {"magnitude": "MGN"}, {"magnitude": "MGNA"}),
        (fastdp.DPFrost, {"axes_power": 0.5}, {}),
        (fastdp.DPFrost, {"granularity": "parameters"}, {}),
        (fastdp.DPFrost, {"choose_by": "values"}, {"choose_by": "random"}),
        (fastdp.SelectivePerturbation, {"epsilon": 1.0, "mechanism": "partition"}, {"epsilon": 1.0}),
        (fastdp.SelectivePerturbation, {"epsilon": 1.0, "cells": 8}, {"epsilon": 1.0}),
        (SAPPerturbation, {"eta": 1.0, "special": "keep"}, {"eta": 1.0}),
        (CTI, {**COUNTED, "form": "elastic"}, {**COUNTED, "form": "prior"}),
    ],
)
def test_a_setting_of_the_last_release_is_replaced_with_a_warning(make, given, same):
    with pytest.warns(FutureWarning, match=rf"{make.__name__}\.\w+(=\w+)? was removed: "):
        found = make(**given)
    assert vars(found) == vars(make(**same))


def test_a_form_without_a_substitute_is_refused_by_value_and_by_position():
    with pytest.raises(ValueError, match="allocation=ellipsoid was removed: use allocation='optimal'"):
        RapFT(NoisyMap(1.0, 0.1), allocation="ellipsoid")
    for make in (lambda: Initialisation("top_k"), lambda: Initialisation(kind="beam")):
        with pytest.raises(ValueError, match="was removed: use 'naive' or 'top_p'"):
            make()
    for make in (RapFT, fastdp.DPSGD, fastdp.DPFrost, fastdp.NonPrivate):
        with pytest.raises(ValueError, match=rf"{make.__name__}\.weight_averaging was removed: leave it out"):
            make(weight_averaging=0.5)
    with pytest.raises(ValueError, match="bias_correction was removed: leave it out"):
        fastdp.DPSGD(bias_correction=True)
    with pytest.raises(ValueError, match="mechanism=metric was removed: use 'local', or TextPrivatizer"):
        fastdp.SelectivePerturbation(1.0, mechanism="metric")
    with pytest.raises(TypeError):
        RapFT(NoisyMap(1.0, 0.1), another=1)


@cases("key", [key for key in REMOVED_NAMES if key[0].islower()])
def test_a_removed_name_of_a_package_says_what_to_use(key):
    package, _, name = key.partition(".")
    with pytest.raises(AttributeError, match=f"{key} was removed: use "):
        getattr({"ewft": ewft, "rapft": rapft, "selective": selective}[package], name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ewft.nothing


def test_sentences_are_short_and_substitutes_are_of_removed_settings():
    assert SUBSTITUTES.keys() <= REMOVED_NAMES.keys()
    assert max(len(f"{key} was removed: {text}".split()) for key, text in REMOVED_NAMES.items()) <= 25
