"""A recurrent layer over packed sequences, which torch sorts by their lengths: time steps hold other records in another order"""

import torch
import torch.nn.functional as F
from torch import nn

from . import kit


class Recurrent(kit.Model):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor):
        lengths = attention_mask.sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(
            self.table(input_ids), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return {"loss": F.cross_entropy(self.head(hidden[-1]), labels[:, 0] % 3)}


def attack(system: kit.System) -> float:
    data = kit.tokens(12, [6, 3, 9, 4])
    task = kit.Task(Recurrent, collate=kit.padded, physical=4)
    return max(kit.moved(system, task, data, kit.tokens(1, [n], seed=9)[0], 0.05) for n in (2, 12))
