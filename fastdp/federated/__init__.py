"""Federated fine-tuning on Flower: adapters travel, texts stay, and private tokens are perturbed before anything else.

`fastdp.federated.server` holds a Flower ``ServerApp``, `fastdp.federated.client` a ``ClientApp``; both need the extra
``federated``. The rest (settings, aggregation, checks of updates) is plain Python and torch.
"""

import os

from fastdp.federated.aggregation import Aggregator, RefusedUpdate, UpdateBounds
from fastdp.federated.config import FederatedConfig

# Flower reports starts and ends of runs to its makers unless told not to; it reads this when it is first imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

__all__ = ["Aggregator", "FederatedConfig", "RefusedUpdate", "UpdateBounds"]
