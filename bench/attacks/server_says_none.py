"""A federation's server that asks for no perturbation gets none from a client whose own settings are stricter"""

from . import systems


def attack(system: systems.FastDP) -> float:
    from fastdp.federated.policy import client_settings

    run = {"model": "m", "output": "o", "eval": "e", "perturbation": "none", "epsilon": 1000.0}
    own = {"train": "own.csv", "state": "kept", "perturbation": "all", "epsilon": 1.0, "dpsgd-epsilon": 1.0}
    found = client_settings(run, own)
    kept = found.perturbation == "all" and found.epsilon <= 1.0 and (found.dpsgd_epsilon or float("inf")) <= 1.0
    return 1.0 if kept else float("inf")
