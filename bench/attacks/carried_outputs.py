"""Outputs of the batch before, kept by the training loop and compared with in the next one's loss"""

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    task, sums = kit.Task(kit.Scores, criterion=lambda output, batch: output.sum()), []
    for extra in ([], kit.records(1, 30.0, 5)):
        private = library.start(task, [*extra, *kit.records(16)], 0.2, epochs=6)
        kept = None
        for _ in range(6):
            for batch in private.data_loader:
                private.optimizer.zero_grad()
                output = private.model(**batch)
                loss = (output.square().mean(1) + (0 if kept is None else (output @ kept).tanh())).mean()
                loss.backward()
                private.optimizer.step()
                kept = output.detach().mean(0)
        sums.append({n: p.grad * len(private.data_loader.dataset) for n, p in private.parameters.items()})
        private.detach()
    return kit.apart(*sums) / 0.2
