"""Fine-tuning language models on private data, fast, with a privacy figure that holds."""

import importlib
import importlib.abc
import importlib.util
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastdp import accounting as accounting, audit as audit, nn as nn, ops as ops, optim as optim
    from fastdp.entry import make_private as make_private
    from fastdp.integrations.adapters import BottleneckConfig as BottleneckConfig
    from fastdp.integrations.trainer import (
        DPSeq2SeqTrainer as DPSeq2SeqTrainer,
        DPTrainer as DPTrainer,
        PrivacyArguments as PrivacyArguments,
    )
    from fastdp.integrations.trl import DPDPOTrainer as DPDPOTrainer, DPSFTTrainer as DPSFTTrainer
    from fastdp.methods.dpsgd import DPSGD as DPSGD, AdaptiveClipping as AdaptiveClipping, NonPrivate as NonPrivate
    from fastdp.methods.ewft import EWFT as EWFT
    from fastdp.methods.frost import DPFrost as DPFrost
    from fastdp.methods.rapft import RapFT as RapFT
    from fastdp.methods.sap import TextPrivatizer as TextPrivatizer
    from fastdp.methods.selective import SelectivePerturbation as SelectivePerturbation
    from fastdp.methods.votes import PrivateVotes as PrivateVotes
    from fastdp.methods.zeroth import DPZO as DPZO
    from fastdp.ops.stream import NoiseStream as NoiseStream
    from fastdp.private.registry import detach as detach
    from fastdp.private.run import Private as Private
    from fastdp.split import SplitCustomer as SplitCustomer, SplitVendor as SplitVendor

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if os.path.exists(os.path.join(_FOLDER, "privacy_engine.py")):
    raise ImportError(
        f"{_FOLDER} also holds awslabs' fastDP, because this disk ignores the case of names. Give each an environment of its own"
    )
if os.path.exists(os.path.join(os.path.dirname(_FOLDER), "fastDP", "privacy_engine.py")):
    warnings.warn(
        "awslabs' fastDP is installed too: `import fastDP` is that library, `import fastdp` is this one", stacklevel=2
    )

#: Where each public name lives; a module is imported when its name is first asked for.
_HOMES = {
    "AdaptiveClipping": "fastdp.methods.dpsgd",
    "BottleneckConfig": "fastdp.integrations.adapters",
    "DPDPOTrainer": "fastdp.integrations.trl",
    "DPFrost": "fastdp.methods.frost",
    "DPSFTTrainer": "fastdp.integrations.trl",
    "DPSeq2SeqTrainer": "fastdp.integrations.trainer",
    "DPSGD": "fastdp.methods.dpsgd",
    "DPTrainer": "fastdp.integrations.trainer",
    "DPZO": "fastdp.methods.zeroth",
    "EWFT": "fastdp.methods.ewft",
    "NoiseStream": "fastdp.ops.stream",
    "NonPrivate": "fastdp.methods.dpsgd",
    "Private": "fastdp.private.run",
    "PrivateVotes": "fastdp.methods.votes",
    "PrivacyArguments": "fastdp.integrations.trainer",
    "RapFT": "fastdp.methods.rapft",
    "SelectivePerturbation": "fastdp.methods.selective",
    "SplitCustomer": "fastdp.split",
    "SplitVendor": "fastdp.split",
    "TextPrivatizer": "fastdp.methods.sap",
    "detach": "fastdp.private.registry",
    "make_private": "fastdp.entry",
}
_MODULES = ("accounting", "audit", "nn", "ops", "optim")
__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if importlib.util.find_spec(f"fastdp.{name}") is not None:
        return importlib.import_module(f"fastdp.{name}")
    raise AttributeError(f"module 'fastdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _PeftImportHook(importlib.abc.MetaPathFinder):
    """Registers `BottleneckConfig` with peft when peft is imported: importing it takes four seconds, and not every user needs it.

    It stays in place while peft is only looked for, as transformers does to see whether it is installed.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "peft":
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_and_register(module: Any) -> None:
                run(module)
                importlib.import_module("fastdp.integrations.adapters")

            spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec


if "peft" in sys.modules:
    importlib.import_module("fastdp.integrations.adapters")
else:
    sys.meta_path.insert(0, _PeftImportHook())
