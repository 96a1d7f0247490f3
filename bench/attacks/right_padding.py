"""A long record changes the padding of everyone else, and a head or a loss that reads padding lets it through"""

from . import kit


def attack(system: kit.System) -> float:
    def forward(own, input_ids, attention_mask, labels):
        # A mean over tokens, padding included.
        logits = own.head(own.table(input_ids).mean(1))
        return {"loss": kit.F.cross_entropy(logits, labels[:, 0].clamp(min=0)), "logits": logits}

    task = kit.Task(kit.net(kit.Words, forward=forward), collate=kit.padded)
    return kit.moved(system, task, kit.tokens(12, [6, 7, 9]), kit.tokens(1, [60], seed=3)[0], 0.5)
