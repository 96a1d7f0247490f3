"""The customer's end of the network: repeat a call unchanged until it is answered or refused."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from pathlib import Path

from fastdp.split.channel import CUSTOMER, METHOD, OPTIONS, check_insecure, check_secured, grpc
from fastdp.split.operations import MessageForm, expecting
from fastdp.split.wire import Message, MessageRejected, Outgoing, receive
from fastdp.tls import Credentials
from fastdp.untrusted import escape_controls
from fastdp.validate import host_and_port

#: Largest answer in memory (logits), and in a file (the bottom of a model).
_MOST_OF_AN_ANSWER, _MOST_OF_A_FILE = 1 << 28, 1 << 36
_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
#: Most characters of what a vendor says.
_LONGEST_REASON = 1000
#: How gRPC says that this end turned the other's certificate down.
_UNTRUSTED = ("TSI_PROTOCOL_FAILURE", "Hostname Verification Check failed")
_TRANSIENT_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")

log = logging.getLogger(__name__)


class Connection:
    """Calls to one vendor, one after another. Every operation may be repeated without being done twice.

    Args:
        address: host and port of the vendor.
        certificates: the customer's own folder of `make_certificates`.
        insecure: no TLS, on this machine alone; ``name`` then says who calls.
        deadline: longest a call may last, in seconds.
        patience: how long to go on trying to reach a vendor that does not answer, in seconds.

    Raises:
        ImportError: without gRPC.
        ValueError: for certificates that cannot be used, an address that is none, or ``insecure`` on another machine.
    """

    def __init__(
        self,
        address: str,
        certificates: Path | None = None,
        *,
        insecure: bool = False,
        name: str = "customer",
        deadline: float = 120.0,
        patience: float = 300.0,
    ):
        check_secured(certificates, insecure)
        host_and_port(address)
        self.address, self.deadline, self.patience = address, deadline, patience
        options = [*OPTIONS, *_RECONNECT]
        self._metadata = None
        if certificates is None:
            check_insecure(address)
            self._metadata = ((CUSTOMER, name),)
            self._channel = grpc.insecure_channel(address, options)
        else:
            own = Credentials.load(certificates)
            secured = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
            self._channel = grpc.secure_channel(address, secured, options)
        self._exchange = self._channel.stream_stream(METHOD)

    def call(self, message: Outgoing, forms: Mapping[str, MessageForm], into: Path | None = None) -> Message:
        """Send a message and take the answer, whose payload goes to the file ``into`` if it is given.

        Args:
            forms: what an answer must be, by operation.

        Raises:
            Rejected: with the vendor's reason, or because the answer is none that may be accepted.
            ConnectionError: if the vendor could not be reached for the time that patience lasts, or cannot be verified.
        """
        begun = time.monotonic()
        pause, warned = _PAUSE, False
        while True:
            try:
                return self._once(message, forms, into)
            except grpc.RpcError as error:
                code, details = error.code().name, escape_controls(error.details() or "")[:_LONGEST_REASON]
                if any(sign in details for sign in _UNTRUSTED):
                    raise ConnectionError(
                        f"the certificate at {self.address} is not one of your authority's for this address ({details})"
                    ) from None
                # Whether it may succeed when it is repeated.
                if code not in _TRANSIENT_CODES and not (
                    code == "RESOURCE_EXHAUSTED" and "Concurrent RPC limit" in details
                ):
                    raise MessageRejected(details, code) from None
                if time.monotonic() - begun + pause > self.patience:
                    raise ConnectionError(
                        f"the vendor at {self.address} did not answer within {self.patience:g} seconds ({details[:100]}): check "
                        "the address, and both ends' certificates"
                    ) from None
            if pause >= _LONGEST_PAUSE and not warned:
                warned = True
                log.warning("no answer from %s yet (%s): trying for %g seconds", self.address, details, self.patience)
            # Many customers wait for one vendor to come back: not all should return at once.
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _once(self, message: Outgoing, forms: Mapping[str, MessageForm], into: Path | None) -> Message:
        answer = self._exchange(iter(message), timeout=self.deadline, metadata=self._metadata)
        expect = expecting({message.op: forms[message.op]})
        try:
            if into is None:
                return receive(answer, expect, _MOST_OF_AN_ANSWER)
            with open(into, "wb") as file:
                return receive(answer, expect, _MOST_OF_A_FILE, file)
        except MessageRejected as refusal:
            answer.cancel()
            raise MessageRejected(
                f"the vendor's answer to {message.op} cannot be used: {refusal}", "DATA_LOSS"
            ) from None

    def close(self) -> None:
        self._channel.close()
