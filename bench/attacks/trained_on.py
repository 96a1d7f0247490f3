"""A model that goes on training without privacy, on the same records, when its run is over: the card names what came of that"""

import torch

from fastdp.accounting.weights import digests

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    private, _ = library.accounted()
    private.detach()
    optimizer = torch.optim.SGD(private.model.parameters(), lr=1.0)
    private.model(**kit.stack(kit.records()))["loss"].backward()
    optimizer.step()
    card = private.card()
    told = any("changed after a release" in sentence for sentence in card["assumptions"])
    return 1.0 if told or not set(digests(private.model.parameters())) & set(card["weights"]) else float("inf")
