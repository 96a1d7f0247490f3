"""The private training file given as the public examples of a relevance map: noise is shaped by the records it should hide"""

import json
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from fastdp.finetune import FinetuneConfig, finetune
from fastdp.quickstart.corpus import private_records

from . import systems


def attack(system: systems.FastDP) -> float:
    with (
        tempfile.TemporaryDirectory() as name,
        resources.as_file(resources.files("fastdp.quickstart") / "model") as model,
    ):
        train, copy = Path(name) / "train.jsonl", Path(name) / "public.jsonl"
        records = private_records(12, 0)
        train.write_text("".join(json.dumps({"text": text}) + "\n" for text in records))
        # A copy in another order and another case, cut short.
        copy.write_text("".join(json.dumps({"text": text.upper()[:300]}) + "\n" for text in reversed(records)))
        settings: dict[str, Any] = {"epsilon": 8.0, "epochs": 1.0, "batch_size": 6, "max_length": 64, "method": "rapft"}
        source = {"kind": "public", "data": str(copy), "examples": 4}
        paths: dict[str, Any] = {"model": str(model), "train": str(train), "output": str(Path(name) / "run")}
        finetune(FinetuneConfig(**paths, **settings, method_options={"source": source}))
    return float("inf")
