"""The Flower app's client: fastdp's own."""

from fastdp.federated.client import app

__all__ = ["app"]
