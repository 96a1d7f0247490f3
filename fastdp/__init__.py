"""Fine-tuning language models on private data, fast, with a privacy figure that holds."""

from typing import TYPE_CHECKING, Any

from fastdp import accounting, ops, optim
from fastdp.engine.private import Private, make_private
from fastdp.integrations.adapters import BottleneckConfig
from fastdp.methods.dpsgd import DPSGD, AdaptiveClipping, NonPrivate
from fastdp.methods.ewft import EWFT
from fastdp.methods.frost import DPFrost
from fastdp.methods.rapft import RapFT
from fastdp.methods.sap import TextPrivatizer
from fastdp.ops.stream import NoiseStream

if TYPE_CHECKING:
    from fastdp.integrations.trainer import DPTrainer, PrivacyArguments
    from fastdp.methods.selective import SelectivePerturbation
    from fastdp.split import SplitCustomer, SplitVendor

__all__ = [
    "DPSGD",
    "AdaptiveClipping",
    "BottleneckConfig",
    "DPFrost",
    "DPTrainer",
    "EWFT",
    "NoiseStream",
    "NonPrivate",
    "Private",
    "PrivacyArguments",
    "RapFT",
    "SelectivePerturbation",
    "SplitCustomer",
    "SplitVendor",
    "TextPrivatizer",
    "accounting",
    "make_private",
    "ops",
    "optim",
]


def __getattr__(name: str) -> Any:
    # transformers' Trainer needs accelerate, which is an extra: it is imported when asked for.
    if name in ("DPTrainer", "PrivacyArguments"):
        from fastdp.integrations import trainer

        return getattr(trainer, name)
    if name == "SelectivePerturbation":
        from fastdp.methods import selective

        return getattr(selective, name)
    # gRPC is an extra too.
    if name in ("SplitCustomer", "SplitVendor"):
        from fastdp import split

        return getattr(split, name)
    raise AttributeError(f"module 'fastdp' has no attribute {name!r}")
