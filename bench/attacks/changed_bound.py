"""The bound is put up between two micro-batches of one logical batch, and down again before its noise is drawn"""

import dataclasses

from fastdp.private.observer import Observer

from . import kit, systems


class Raising(Observer):
    def before_release(self, accumulator) -> None:
        self.accumulator, self.policy = accumulator, accumulator.policy


def attack(library: systems.FastDP) -> float:
    sums = []
    for data in (kit.records(16), [*kit.records(15), kit.outlier(30.0)]):
        task = kit.Task(kit.Net, physical=4)
        private, looker = library.start(task, data, 0.2, epochs=2), Raising()
        private.observe(looker)
        list(library.steps(private, task))
        private.optimizer.zero_grad()
        for number, batch in enumerate(private.data_loader):
            bounds = (0.2 if number < 2 else 20.0,)
            looker.accumulator.policy = dataclasses.replace(looker.policy, bounds=bounds)
            private.model(**batch)["loss"].backward()
            looker.accumulator.policy = looker.policy
            private.optimizer.step()
            if not private.last_step_done:
                private.optimizer.zero_grad()
        sums.append({name: p.grad * 16 for name, p in private.parameters.items()})
        private.detach()
    return kit.apart(*sums) / 0.2
