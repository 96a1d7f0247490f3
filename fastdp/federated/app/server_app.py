"""The Flower app's server: fastdp's own."""

from fastdp.federated.server import app

__all__ = ["app"]
