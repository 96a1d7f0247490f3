"""Settings and forms that were removed say what replaces them; those of the last release are replaced with a warning."""

import pytest

import fastdp
from fastdp.methods import ewft, rapft
from fastdp.methods.rapft import Initialisation, NoisyMap, PublicGradients, RapFT
from fastdp.methods.removed import REMOVED_NAMES, SUBSTITUTES
from tests.cases import cases

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
    ],
)
def test_a_setting_of_the_last_release_is_replaced_with_a_warning(make, given, same):
    with pytest.warns(FutureWarning, match=rf"{make.__name__}\.\w+(=\w+)? was removed: "):
        found = make(**given)
    assert found == make(**same)


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
    with pytest.raises(TypeError):
        RapFT(NoisyMap(1.0, 0.1), another=1)


@cases("key", [key for key in REMOVED_NAMES if key[0].islower()])
def test_a_removed_name_of_a_package_says_what_to_use(key):
    package, _, name = key.partition(".")
    with pytest.raises(AttributeError, match=f"{key} was removed: use "):
        getattr({"ewft": ewft, "rapft": rapft}[package], name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ewft.nothing


def test_sentences_are_short_and_substitutes_are_of_removed_settings():
    assert SUBSTITUTES.keys() <= REMOVED_NAMES.keys()
    assert max(len(f"{key} was removed: {text}".split()) for key, text in REMOVED_NAMES.items()) <= 25
