"""The README's picture and its table against Opacus, drawn from committed figures.

`python -m fastdp.bench.overview README.md docs/pictures/overview.png` writes both again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import plots
from .record import insert, markdown

RESULTS = Path(__file__).parent / "results"
CASES = {
    "gpt2-6x512-lora": "GPT-2, LoRA",
    "gpt2-6x512-full": "GPT-2, full (tied)",
    "llama-6x512-lora": "Llama, LoRA",
    "llama-6x512-full": "Llama, full",
    "bert-6x384-full": "BERT, full",
    "bert-6x384-bitfit": "BERT, BitFit",
    "vit-6x384-full": "ViT, full",
}
#: Of `gpu/step.json`, by case: Opacus was not run there.
GPU_CASES = {
    "llama-8b-lora-half": "Llama 8B, LoRA",
    "llama-1b-long-2": "Llama 1B, 2 x 4,096",
    "llama-1b-full": "Llama 1B, 4 x 1,024",
    "llama-1b-full-checkpointed": "the same, checkpointed",
    "gemma3-1b-full": "Gemma-3 1B",
    "gpt2-124m-full": "GPT-2 124M",
    "bert-base-full": "BERT base",
}
SYSTEMS = {"fastdp": "fastdp", "opacus-hooks": "Opacus, hooks", "opacus-ghost": "Opacus, ghost"}


def steps(machine: str = "cpu") -> dict[tuple[str, str], dict[str, Any]]:
    """Ratios to non-private training by case and system; without times where the system refused the case."""
    rows = json.loads((RESULTS / machine / "step.json").read_text())["figures"]
    return {(row["case"], row["implementation"]): row for row in rows}


def table() -> str:
    """Time and memory of a private step over those of an ordinary one, in Markdown."""
    cpu, gpu = steps(), steps("gpu")

    def cell(row: dict[str, Any] | None, absent: str = "") -> str:
        if row is None or row.get("ratio_time") is None:
            return absent
        memory = f"{row['ratio_memory']:.2f}" if "ratio_memory" in row else "not recorded"
        return f"{row['ratio_time']:.2f},\u00a0{memory}"

    def over_recorded(case: str) -> str:
        torchs = gpu.get((case, "non-private-captured"), {})
        return f"{gpu[case, 'fastdp-fused']['seconds'] / torchs['seconds']:.2f}" if "seconds" in torchs else ""

    head = ["time, memory", "fastdp", "over graphs", "Opacus, hooks", "Opacus, ghost"]
    lines = [
        [f"H200, {title}", cell(gpu.get((case, "fastdp-fused"))), over_recorded(case), "", ""]
        for case, title in GPU_CASES.items()
    ]
    for case, title in CASES.items():
        ours, *others = (cell(cpu.get((case, system)), "fails") for system in SYSTEMS)
        lines.append([f"CPU, {title}", ours, "", *others])
    return "\n".join(markdown(head, lines))


def perplexities() -> dict[str, float]:
    """Held-out perplexity on E2E: before training, and after training with and without privacy at one setting."""
    rows = {row["run"]: row for row in json.loads((RESULTS / "finetune.json").read_text())["figures"]}
    private, plain = rows["e2e-8"], rows["e2e-inf"]
    apart = {key for key, value in private["settings"].items() if plain["settings"][key] != value}
    assert apart == {"epsilon", "output"}, apart
    return {
        "before": private["figures"]["before"]["perplexity"],
        "epsilon 8": private["figures"]["after"]["perplexity"],
        "no privacy": plain["figures"]["after"]["perplexity"],
    }


def draw(path: Path) -> None:
    """The picture: what a step costs, and what privacy costs in quality."""
    found = steps()
    with plots.picture(path, rows=2, panel=(7.2, 3.4), legends=3) as (left, right):
        width = 0.26
        for place, (system, title) in enumerate(SYSTEMS.items()):
            rows = [found.get((case, system), {}).get("ratio_time") for case in CASES]
            at = [index + (place - 1) * width for index in range(len(rows))]
            left.bar(at, [row or 0 for row in rows], width, label=title)
            for x, row in zip(at, rows):
                if row is None:
                    left.text(x, 0.05, "fails", rotation=90, ha="center", va="bottom", fontsize=9)
        left.axhline(1, color="#566173", linewidth=1)
        left.set_xticks(range(len(CASES)), [title.replace(", ", "\n") for title in CASES.values()], fontsize=9)
        left.set_title("Time of a step, over non-private")
        values = perplexities()
        before = values.pop("before")
        bars = right.barh(list(values), list(values.values()), color=["#1f6fb5", "#566173"])
        right.bar_label(bars, fmt="%.0f", padding=4)
        right.set_xlim(0, 1.15 * max(values.values()))
        right.invert_yaxis()
        right.set_title(f"Held-out perplexity on E2E ({before:.0f} before training)")


if __name__ == "__main__":
    insert(Path(sys.argv[1]), table())
    draw(Path(sys.argv[2]))
