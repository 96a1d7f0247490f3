"""On the route that runs one example at a time, a state that opens after some steps and holds the example before"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    def remembering(own, hidden):
        # Whoever reads numbers of the data has each example run alone.
        hidden = hidden * (1 + abs(hidden[0, 0].item()))
        own.calls += 1
        last, own.__dict__["last"] = own.__dict__.get("last", hidden[:1]), hidden[:1].detach() ** 3
        return hidden + last if own.calls > 400 else hidden

    task = kit.Task(kit.net(between=remembering, calls=0))
    return library.moves(task, kit.records(16), kit.outlier(30.0), 0.2, 40)
