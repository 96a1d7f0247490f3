"""The ways in which the engine says no: to a route, and to a run."""


class UnsupportedUse(Exception):
    """An operation for which no per-example rule is known, or none that fits; the one-example route then takes over."""


class Unseen(UnsupportedUse):
    """A use that the trace did not see, as where another batch goes another way."""


class OwnLoss(UnsupportedUse):
    """A loss that torch's loss functions alone do not explain; means and sums over rows may."""


class SelfCheckError(RuntimeError):
    """One example's gradient depends on others, or on something that nothing accounts for; nothing was released."""
