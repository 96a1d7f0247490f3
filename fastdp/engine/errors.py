"""Errors of the engine: those that refuse a route, after which another is taken, and those that refuse the run."""

from fastdp.calls.errors import SelfCheckError as SelfCheckError

#: Where one backward pass reaches forward passes that do not belong together, as those of two batches.
TWO_FORWARDS = (
    "Two forward passes ran before one backward. Run one forward per batch, then backward(). Or call the model twice inside one "
    "wrapper module's forward()."
)
NO_BATCH = "This batch is not private.data_loader's next: iterate over that, and run all passes before one backward()."
FORWARD_AFTER_BACKWARD = (
    "A forward pass ran after its batch's backward(). Call that once, on the sum of all passes; replace SAM by AdamW."
)
CALLED_ON_OUTPUTS = "The model was called on its own outputs. Run all steps inside its forward(), called once."
OUTSIDE_OF_LOSS = (
    "A gradient reached the model outside of its loss. Return all it reads from forward(), call backward() once; penalize "
    "weights by weight_decay= or optimizer.register_step_pre_hook."
)
FAILED_BACKWARD = "A backward pass failed, and a repetition could count examples twice. Iterate the loader anew."


class UnsupportedUse(Exception):
    """An operation for which no per-example rule is known, or none that fits; the one-example route then takes over."""


class UnseenUse(UnsupportedUse):
    """A use that the trace did not see, as where a later batch takes another branch of the model."""


class Untraceable(ValueError):
    """A model or a call of which tracing shows that no route serves it."""


class InnerBackward(UnsupportedUse):
    """A model that differentiates inside its own forward pass, as for gradient penalties and adversarial inputs."""


class OwnLoss(UnsupportedUse):
    """A loss that torch's loss functions alone do not explain; the model's own means and sums over rows may."""
