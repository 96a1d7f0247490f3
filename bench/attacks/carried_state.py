"""A model that keeps a hidden state from one batch to the next, in a plain attribute: a record is in every later one's loss"""

from . import kit


def attack(system: kit.System) -> float:
    def carried(own, hidden):
        hidden = hidden + own.state
        own.state = 0.5 * hidden.detach().mean(0)
        return hidden

    task = kit.Task(kit.net(between=carried, state=0.0), physical=4)
    return kit.moved(system, task, kit.records(32), kit.outlier(30.0), 0.2, first=True)
