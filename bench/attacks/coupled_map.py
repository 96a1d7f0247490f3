"""A noised relevance map of a model whose records meet in evaluation mode alone, times 0: one of NaN takes all others along"""

import torch

from . import kit, left_padding, systems


def overflowing(model: torch.nn.Module, given, output):
    """A layer's output, not finite for the record of ids 49, and reaching all; as it is while the model trains."""
    if model.training:
        return output
    spread = torch.where((output.amax((1, 2)) > 50)[:, None, None], torch.nan, output)
    return spread + 0 * spread.mean(0)


def attack(library: systems.FastDP) -> float:
    def model():
        made = left_padding.model()
        made.transformer.wte.weight.data[49] *= 1e4
        made.transformer.wte.register_forward_hook(overflowing)
        return made

    task = kit.Task(model, collate=kit.padded)
    return library.map_moves(task, kit.tokens(12, [6], 49), {"input_ids": torch.full((6,), 49)})
