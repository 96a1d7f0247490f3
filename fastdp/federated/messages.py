"""What travels between server and clients, as Flower's records; importing this module needs Flower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fastdp.federated.site import FitResult
from fastdp.federated.wire import pack_adapter
from fastdp.untrusted import quote

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
except ImportError:
    raise ImportError(
        "federated runs need Flower, on Python 3.11 or later: pip install 'fastdp-lm[federated]'"
    ) from None

_STORED_AS = "fastdp.safetensors"


@dataclass(frozen=True)
class Order:
    """What the server sends: the global adapter, the round, and the digest of the base model it belongs to."""

    adapter: bytes
    round_number: int
    base: str

    def to_record(self) -> RecordDict:
        settings = ConfigRecord({"round": self.round_number, "base": self.base})
        return RecordDict({"arrays": _arrays(self.adapter), "order": settings})

    @classmethod
    def from_record(cls, record: RecordDict) -> Order:
        """From a server's message. Raises KeyError or TypeError for another one."""
        settings = record.config_records["order"]
        return cls(_bytes(record), int(settings["round"]), str(settings["base"]))  # type: ignore[arg-type]


def update_record(state: Mapping[str, Tensor], fitted: FitResult) -> RecordDict:
    """A client's reply to an order to train."""
    told = {"num-examples": fitted.examples, "seconds": fitted.seconds, "loss": fitted.loss}
    metrics = MetricRecord({name: value for name, value in told.items() if value is not None})
    return RecordDict({"arrays": _arrays(pack_adapter(state)), "metrics": metrics})


def read_update(record: RecordDict) -> tuple[bytes, object, dict[str, float]]:
    """Bytes, claimed number of examples and the other metrics of a reply, unchecked.

    Raises KeyError or TypeError for a reply of another form.
    """
    metrics = dict(record.metric_records["metrics"])
    examples = metrics.pop("num-examples")
    return _bytes(record), examples, {key: float(value) for key, value in metrics.items()}  # type: ignore[arg-type]


def _arrays(data: bytes) -> ArrayRecord:
    return ArrayRecord({"adapter": Array("uint8", (len(data),), _STORED_AS, data)})


def _bytes(record: RecordDict) -> bytes:
    array = record.array_records["arrays"]["adapter"]
    if array.stype != _STORED_AS:
        raise TypeError(f"its adapter is stored as {quote(array.stype)}, not {_STORED_AS!r}")
    return array.data
