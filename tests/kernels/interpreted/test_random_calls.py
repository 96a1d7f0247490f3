"""Random calls of every op as on a GPU against float64 (`bench.fuzz_ops`), at sizes that an interpreter can reach."""

import pytest
import torch
from fastdp.bench import fuzz_ops

#: Distances are of 64 bits, which the interpreter takes minutes for.
ENTRIES = [at for at, family in enumerate(fuzz_ops.FAMILIES) if family.__name__ != "dchi_vectors"]
#: Of each entry of the families; one with several kinds of calls has several entries. Half of those that snap draw distances.
CALLS = {"snapping": 4}


class Small(fuzz_ops.Draw):
    def size(self, most=40):
        return super().size(min(most, 5000 if most > 1000 else 40))

    def dtype(self):
        # The interpreter rounds to bfloat16 in a way of its own.
        return self.pick.choice((torch.float32, torch.float16) if self.writes else (torch.float32, *fuzz_ops.DTYPES))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("entry", ENTRIES)
def test_random_calls_are_within_their_bounds(as_on_a_gpu, monkeypatch, entry):
    name = fuzz_ops.FAMILIES[entry].__name__
    monkeypatch.setattr(fuzz_ops, "Draw", Small)
    monkeypatch.setattr(Small, "writes", name in ("add_noise", "clip_noise", "adamw"), raising=False)
    found = [fuzz_ops.call(entry + len(fuzz_ops.FAMILIES) * number) for number in range(CALLS.get(name, 8))]
    assert max(share for _, share in found) <= 1, found
