"""A branch on how long a batch is: one record longer than all before it turns round every other of its batch"""

import torch.nn.functional as F

from . import kit, systems


class Branching(kit.Words):
    def forward(self, input_ids, attention_mask, labels):
        hidden = self.table(input_ids)
        logits = self.head(-hidden if input_ids.shape[1] > 20 else hidden)
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def attack(library: systems.FastDP) -> float:
    short, (before,), (after,) = (kit.tokens(count, lengths) for count, lengths in ((16, [5, 8]), (1, [9]), (1, [30])))
    return kit.beside_a_late(library, kit.Task(Branching, collate=kit.padded), short, before, after)
