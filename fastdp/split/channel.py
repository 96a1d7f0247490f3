"""What both ends of the network share: gRPC itself, the method's name, addresses, and what an end may do without TLS."""

from __future__ import annotations

from pathlib import Path

from fastdp.split.wire import CHUNK_BYTES
from fastdp.validate import host_and_port, is_loopback

try:
    import grpc as grpc
except ImportError:
    raise ImportError("a split model over the network needs gRPC: pip install 'fastdp-lm[split]'") from None

METHOD = "/fastdp.split/Exchange"
#: Name of the call's metadata that says who calls, where there are no certificates.
CUSTOMER = "fastdp-customer"
#: A message of gRPC is one chunk; more is turned away before it is read.
OPTIONS = [
    ("grpc.max_receive_message_length", CHUNK_BYTES + (1 << 10)),
    ("grpc.max_send_message_length", CHUNK_BYTES + (1 << 10)),
]


def check_insecure(address: str) -> None:
    """Raises ValueError for an address that other machines can reach."""
    host, _ = host_and_port(address)
    if not is_loopback(host):
        raise ValueError(f"insecure is for this machine alone, and {host} is not: use certificates, or 127.0.0.1")


def check_secured(certificates: Path | None, insecure: bool) -> None:
    """Raises ValueError unless there are certificates, or ``insecure``, and not both."""
    if (certificates is None) != insecure:
        raise ValueError(
            "give a folder of certificates (fastdp split certificates makes one), or insecure, and not both"
        )
