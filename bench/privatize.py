"""Tokens a second of `TextPrivatizer`, text in and text out, as `fastdp privatize` runs it.

    python -m bench.privatize --model MODEL --text FILE --json bench/results/privatize.json

FILE is plain text, or a table with a column ``sentence``. `FASTDP_ISA=avx2` measures what a processor without matrix units or
bfloat16 products would do: the search then multiplies in float32.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from fastdp import TextPrivatizer
from fastdp.commands.quiet import quiet_libraries
from fastdp.data import read_rows
from fastdp.untrusted import load_pretrained

from .record import parser_of, write

SETTINGS = [("laplace", eta) for eta in (10.0, 50.0, 75.0, 200.0)] + [("exponential", eta) for eta in (4.0, 16.0, 26.0)]


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, and write to --json."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--column", default="sentence")
    parser.add_argument("--lines", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args(arguments)
    quiet_libraries()
    texts = read_rows(given.text).column(given.column, "--column")[: given.lines]
    rows = [measure(given.model, texts, mechanism, eta, given.turns) for mechanism, eta in SETTINGS]
    limits = {name: os.environ[name] for name in ("FASTDP_ISA",) if name in os.environ}
    figures = {"model": Path(given.model).name, "texts": len(texts), "limited_to": limits, "rows": rows}
    write(given.json, figures)


def measure(name: str, texts: list[str], mechanism: str, eta: float, turns: int) -> dict[str, Any]:
    """Median tokens a second over a few turns, after one on a few texts."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = load_pretrained(AutoModel, name), load_pretrained(AutoTokenizer, name)
    privatizer = TextPrivatizer(model, eta=eta, tokenizer=tokenizer, mechanism=mechanism, duplicates="merge")
    tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    list(privatizer.stream_texts(texts[:64]))
    speeds = []
    for _ in range(turns):
        begin = time.perf_counter()
        for _ in privatizer.stream_texts(texts):
            pass
        speeds.append(tokens / (time.perf_counter() - begin))
    row = {
        "mechanism": mechanism,
        "eta": eta,
        "tokens": tokens,
        "tokens_per_second": statistics.median(speeds),
        "unchanged": privatizer.displacement().unchanged,
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
