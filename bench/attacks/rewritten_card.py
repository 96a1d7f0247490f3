"""A card rewritten, its digest made anew, verifies: beside the run's ledger, or alone without a word of what was not checked"""

import json
import tempfile
from pathlib import Path

from fastdp.accounting import verify
from fastdp.accounting.card import digest

from . import systems


def attack(library: systems.FastDP) -> float:
    with tempfile.TemporaryDirectory() as folder:
        private, _ = library.accounted(output_dir=folder)
        card, ledger = dict(private.card()), Path(folder) / "ledger.jsonl"
        private.detach()
        if not verify(card, ledger=ledger):
            raise ValueError("the card as it was written does not verify")
        for forgery in ({"unit": "user (at most 99 examples)"}, {"dataset_size": 10**9}, {"adjacency": "zero_out"}):
            forged = {**card, **forgery}
            forged["digest"] = digest(forged)
            alone = verify(forged)
            if verify(forged, ledger=ledger).guarantee or (alone.guarantee and not alone.unchecked):
                return float("inf")
        # Of a key that comes twice, readers keep the last, and people see the first.
        twice = json.dumps(card)[:-1] + ', "unit": ' + json.dumps(card["unit"]) + "}"
        return float("inf") if verify(twice).guarantee else 1.0
