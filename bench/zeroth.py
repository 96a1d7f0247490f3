"""Peak memory of a DP-ZO step over that of inference, and of a DP-SGD step for comparison.

    python -m bench.zeroth --json bench/results/zeroth.json

Each in a process of its own, on a processor: weights and what the call takes above them, as `bench.memory.growth` says.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch.utils.data import DataLoader

import fastdp

from . import memory

ROWS, TOKENS = 8, 64
SIZES: dict[str, Any] = {"vocab_size": 8192, "n_embd": 384, "n_layer": 4, "n_head": 6, "n_positions": TOKENS}


def peak(form: str) -> dict[str, Any]:
    """Bytes of weights, and of the third step above them; of the first one too, which is checked."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES)).train()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(SIZES["vocab_size"], (ROWS, TOKENS))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids] * 4
    if form == "inference":
        batch = {"input_ids": ids, "labels": ids}
        with torch.no_grad():
            grown = [memory.growth(lambda: model.eval()(**batch).loss) for _ in range(3)]
        return {"form": form, "weights": weights, "first": grown[0], "step": grown[-1]}
    method = fastdp.DPZO() if form == "dpzo" else fastdp.DPSGD()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    options: Any = {"noise_multiplier": 1.0, "target_delta": 1e-5, "epochs": 1, "sampling": "shuffled"}
    run: Any = fastdp.make_private(
        model, optimizer, DataLoader(rows, batch_size=ROWS), method=method, shapes="public", **options
    )
    batches = iter(run.data_loader)

    def step() -> None:
        model(**next(batches)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    grown = [memory.growth(step) for _ in range(3)]
    return {"form": form, "weights": weights, "first": grown[0], "step": grown[-1]}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    path, rows = parser.parse_args().json, []
    for form in ("inference", "dpzo", "dpsgd"):
        with memory.process(memory.ENVIRONMENT) as apart:
            rows.append(apart.submit(peak, form).result())
    whole = {row["form"]: row["weights"] + row["step"] for row in rows}
    ratios = {f"{form}_over_inference": round(whole[form] / whole["inference"], 3) for form in ("dpzo", "dpsgd")}
    setting = {**SIZES, "rows": ROWS, "tokens": TOKENS, "threads": torch.get_num_threads()}
    path.write_text(json.dumps({"setting": setting, "ratios": ratios, "rows": rows}, indent=1) + "\n")
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
