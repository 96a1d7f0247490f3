"""A batch trained on in part: the model is called with some of the rows that the ticket stands for"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    private = library.start(kit.Task(kit.Net), kit.records(4, 9.0), 0.05)
    for batch in private.data_loader:
        # Every row twice: a unit's two rows would be two units.
        private.model(**{name: t.repeat_interleave(2, 0) for name, t in batch.items()})["loss"].backward()
        private.optimizer.step()
    return float(private.model.second.weight.grad.norm()) * 4 / 0.05 / 4
