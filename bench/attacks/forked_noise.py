"""A process forked from a run draws the run's noise again"""

import multiprocessing

import torch

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    task = kit.Task(kit.Net)
    private = library.start(task, kit.records(), 1.0, noise_multiplier=1.0, epochs=2)
    fork = multiprocessing.get_context("fork")
    queue = fork.SimpleQueue()

    def child() -> None:
        torch.set_num_threads(1)
        queue.put(next(library.steps(private, task))["second.weight"].tolist())

    # A child of a process with threads must not use them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    process = fork.Process(target=child)
    process.start()
    process.join(60)
    ours = next(library.steps(private, task))["second.weight"]
    torch.set_num_threads(threads)
    if process.exitcode != 0:
        return 0.0
    return float("inf") if kit.same(ours, torch.tensor(queue.get())) else 1.0
