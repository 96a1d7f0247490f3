"""The run's card: what it promises, and what it says is open."""

import dataclasses

from fastdp.federated import FederatedConfig
from fastdp.federated.reports import run_card

CONFIG = FederatedConfig(model="m", output="o", eval="e")


def card(**changes):
    return run_card(dataclasses.replace(CONFIG, **changes), [], 2)


def test_a_promise_of_one_draw_is_one_of_this_run():
    """A second run whose clients lost their draws is a second budget."""
    found = card()
    assert any("drawn once in this run" in entry for entry in found["unprotected"])
    assert any(entry.startswith("further runs") for entry in found["unprotected"])
    assert not any(entry.startswith("further runs") for entry in card(perturbation="none")["unprotected"])


def test_what_clients_report_without_noise_is_listed():
    assert "training losses that clients report" in card()["unprotected"]
    assert "training losses that clients report" not in card(dpsgd_epsilon=1.0)["unprotected"]
