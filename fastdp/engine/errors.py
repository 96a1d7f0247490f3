"""The ways in which the engine says no: to a route, and to a run."""

from fastdp.calls.errors import SelfCheckError as SelfCheckError


class UnsupportedUse(Exception):
    """An operation for which no per-example rule is known, or none that fits; the one-example route then takes over."""


class UnseenUse(UnsupportedUse):
    """A use that the trace did not see, as where another batch goes another way."""


class Untraceable(ValueError):
    """A model or a call that no route serves, as its trace tells."""


class FlatBags(Untraceable):
    """A lookup of bags of flat ids, which no slice of a batch gives to one row: collated alone, each example has its own."""


class Differentiates(UnsupportedUse):
    """A model that differentiates inside its own forward pass, as for penalties of gradients and adversarial inputs."""


class OwnLoss(UnsupportedUse):
    """A loss that torch's loss functions alone do not explain; means and sums over rows may."""


def first_line(error: Exception) -> str:
    """What an error of the user's code says, for a message of one line."""
    return str(error).partition("\n")[0] or type(error).__name__
