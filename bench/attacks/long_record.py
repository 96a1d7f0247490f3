"""A record far longer than any before it, at which the plan for computing norms changes"""

from . import kit
from .token_mean_criterion import Tagger


class WithLoss(Tagger):
    def forward(self, input_ids, attention_mask, labels):  # type: ignore[override]
        logits = super().forward(input_ids)
        return {"loss": kit.F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def attack(system: kit.System) -> float:
    task = kit.Task(WithLoss, collate=kit.padded, physical=2)
    return max(
        kit.moved(system, task, kit.tokens(6, [4]), kit.tokens(1, [n], seed=3)[0], 0.05) for n in (63, 700, 3000)
    )
