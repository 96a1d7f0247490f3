"""The server's checkpoint: global adapter, rounds done and their figures in one file, written whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import fastdp.files as files
from fastdp.accounting.serialisation import canonical
from fastdp.federated.config import MAY_CHANGE, FederatedConfig

SERVER_STATE_FILE = "server.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A server between two rounds.

    Attributes:
        adapter: the global adapter.
        population: clients connected when the run began, which central DP counts on.
        rows: the reported figures of each round so far.
        ledger_head: digest of the last record of central DP's ledger, which a resumed run must still hold.
    """

    adapter: dict[str, Tensor]
    population: int
    rows: list[dict[str, Any]]
    ledger_head: str | None = None

    def save(self, folder: Path, config: FederatedConfig) -> None:
        """Keep it in ``folder``: a kill leaves the previous checkpoint or this one."""
        metadata = {
            "config": canonical(config.as_dict()),
            "population": str(self.population),
            "rows": canonical(self.rows),
            "ledger_head": canonical(self.ledger_head),
        }
        files.save_tensors(folder / SERVER_STATE_FILE, self.adapter, metadata)

    @classmethod
    def load(cls, folder: Path, config: FederatedConfig) -> Checkpoint | None:
        """The checkpoint in ``folder``, or None if there is none.

        Raises:
            ValueError: if it is of a run with other settings, damaged, or there and ``resume`` is off.
        """
        path = folder / SERVER_STATE_FILE
        if not path.exists():
            return None
        if not config.resume:
            raise ValueError(f"{folder} already holds a run: set resume to continue it, or name another output")
        with files.kept_tensors(path, "checkpoint that can be read") as (adapter, metadata):
            settings = json.loads(metadata["config"])
            population, rows = int(metadata["population"]), json.loads(metadata["rows"])
            head = json.loads(metadata["ledger_head"])
        for key, value in config.as_dict().items():
            if key not in MAY_CHANGE and settings.get(key) != value:
                raise ValueError(
                    f"the run in {folder} was made with {key} {settings.get(key)!r}, not {value!r}: resume with the same "
                    "settings, or name another output"
                )
        return cls(adapter, population, rows, head)
