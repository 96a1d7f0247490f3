"""The event classes of `dp_accounting`, without the second and a half that importing the package takes.

Its `__init__` imports every accountant, and with them `scipy.stats` and `scipy.signal`; the events themselves need
none. The submodule is loaded by itself under its own name: its classes are those that everybody else sees, whenever they
import `dp_accounting`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting import dp_event
    from dp_accounting.dp_event import DpEvent

_NAME = "dp_accounting.dp_event"


def _load() -> ModuleType:
    if _NAME not in sys.modules:
        package = importlib.util.find_spec("dp_accounting")
        for folder in (package.submodule_search_locations or ()) if package else ():
            file = Path(folder) / "dp_event.py"
            spec = importlib.util.spec_from_file_location(_NAME, file) if file.exists() else None
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                sys.modules[_NAME] = module
                spec.loader.exec_module(module)
                return module
    return importlib.import_module(_NAME)


if not TYPE_CHECKING:
    dp_event = _load()
    DpEvent = dp_event.DpEvent

__all__ = ["DpEvent", "dp_event"]
