"""A run that is pickled or copied carries its key: the copy draws the same noise"""

import copy
import pickle

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    task = kit.Task(kit.Net)
    for doubled in (copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))):
        private = library.start(task, kit.records(), 1.0, noise_multiplier=1.0)
        try:
            twin = doubled(private)
        except Exception as error:
            refusal = error
            continue
        ours, theirs = (next(library.steps(run, task)) for run in (private, twin))
        if all(kit.same(ours[name], theirs[name]) for name in ours):
            return float("inf")
    raise refusal
