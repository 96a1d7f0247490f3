"""One fine-tuning run from a config: files in; weights, privacy card and metrics out.

The settings alone, from which the command line makes its flags, need no torch: the run is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from fastdp.finetune.config import ConfigError, FinetuneConfig, load_config
from fastdp.finetune.reporter import Reporter

if TYPE_CHECKING:
    from fastdp.finetune.folder import Result
    from fastdp.finetune.run import finetune

__all__ = ["ConfigError", "FinetuneConfig", "Reporter", "Result", "finetune", "load_config"]


def __getattr__(name: str) -> Any:
    if name in ("Result", "finetune"):
        from fastdp.finetune import run

        return getattr(run, name)
    raise AttributeError(f"module 'fastdp.finetune' has no attribute {name!r}")
