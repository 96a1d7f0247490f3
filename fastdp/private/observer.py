"""Looking on at a run from inside, as audits and tests do."""

from __future__ import annotations

from fastdp.engine.clip.accumulator import Accumulator


class Observer:
    """Sees a run's private side; override what is of interest, and give it to `Private.observe`.

    What passes here has no noise yet, so nothing that an observer keeps may leave; the card of an observed run says so.
    While a run is observed its noise is not drawn within the optimizer's update, so that `.grad` shows what was released.
    """

    def begin_pass(self) -> None:
        """Iteration over the loader begins."""

    def drawn(self, units: list[int], kind: str) -> list[int]:
        """The units that were drawn for one release of a kind; those returned take part, all or some of them."""
        return units

    def before_release(self, accumulator: Accumulator) -> None:
        """``accumulator.sums`` holds the clipped sums of a logical batch; what is added to them goes through the noise."""

    def after_release(self, accumulator: Accumulator) -> None:
        """`.grad` of each trained parameter holds what was released."""
