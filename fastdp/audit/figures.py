"""What every attack's result is: figures, for a JSON file."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of an attack, a field each."""

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return dataclasses.asdict(self)
