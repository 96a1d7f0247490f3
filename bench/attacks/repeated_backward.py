"""Two backward passes over one batch, or one over a batch that was handed out before: a record counts twice"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    private = library.start(kit.Task(kit.Net), kit.records(1, 9.0), 0.05)
    for batch in private.data_loader:
        loss = private.model(**batch)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        private.optimizer.step()
    return float(private.model.second.weight.grad.norm()) / 0.05
