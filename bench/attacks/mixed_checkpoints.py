"""A checkpoint of two runs' files: the weights of one that spent more, and the privacy state of one that spent less"""

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    def begun(model: torch.nn.Module, noise_multiplier: float, *, steps: bool = True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"noise_multiplier": noise_multiplier, "target_delta": 1e-5, "epochs": 2, "optimizer": optimizer}
        private = library.start(kit.Task(lambda: model), kit.records(), 1.0, **options)
        if steps:
            list(library.steps(private, kit.Task(kit.Net)))
        return private

    loose, strict = begun(kit.Net(), 0.5), begun(kit.Net(), 5.0)
    weights, state = loose.model.state_dict(), strict.state_dict()
    resumed = begun(kit.Net(), 5.0, steps=False)
    resumed.model.load_state_dict(weights)
    resumed.load_state_dict(state)
    told = any("checkpoint of another run" in sentence for sentence in resumed.card()["assumptions"])
    return 1.0 if told else loose.epsilon() / resumed.epsilon()
