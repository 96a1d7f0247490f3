"""Federated fine-tuning on Flower: adapters travel, texts stay, and private tokens are perturbed before anything else.

`fastdp.federated.server` holds a Flower ``ServerApp``, `fastdp.federated.client` a ``ClientApp``; both need the extra
``federated``. The rest (settings, partitions, aggregation, checks of updates) is plain Python and torch.
"""

import os

from fastdp.federated.aggregation import Aggregator, Bounds, RefusedUpdate
from fastdp.federated.config import FederatedConfig
from fastdp.federated.partitioning import partition
from fastdp.federated.wire import Layout

# Flower reports starts and ends of runs to its makers unless told not to; it reads this when it is first imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

__all__ = ["Aggregator", "Bounds", "FederatedConfig", "Layout", "RefusedUpdate", "partition"]
