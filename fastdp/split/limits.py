"""What a vendor takes from its customers."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Limits:
    """What one vendor takes from its customers. What does not fit is refused with a reason, or asked to come back.

    Attributes:
        max_tokens: most tokens of an example.
        max_batch: most examples of a step.
        max_examples: most examples that a customer may store.
        max_stored_bytes: most bytes of rows that a customer may store.
        max_message_bytes: most bytes of a message's payload.
        max_customers: most customers with a run, with a forward pass held in memory, and with a call at once.
        calls: most calls, and most connections, of one customer at once.
        queue: most batches that wait to be computed.
        deadline: longest a call may last, in seconds.
    """

    max_tokens: int = 512
    max_batch: int = 64
    max_examples: int = 1_000_000
    max_stored_bytes: int = 16 << 30
    max_message_bytes: int = 16 << 20
    max_customers: int = 64
    calls: int = 4
    queue: int = 64
    deadline: float = 600.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}: a limit must be above 0")
