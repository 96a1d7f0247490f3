"""A forward hook that mixes the rows of a batch, hung on a layer after the first batch was checked"""

from . import kit, systems


def mix(private) -> None:
    private.model.first.register_forward_pre_hook(lambda module, args: (args[0] + 1e-3 * args[0].mean(0),))


def attack(library: systems.FastDP) -> float:
    return library.moves(kit.Task(kit.Net), kit.records(16), kit.outlier(1e6), 0.2, 2, mix)
