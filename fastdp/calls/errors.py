"""The refusal of a batch, before anything of it is released."""

import torch


class SelfCheckError(RuntimeError):
    """One example's gradient depends on others, or on something that nothing accounts for; nothing was released."""


def pass_writes(name: str) -> SelfCheckError:
    """The refusal of a pass that writes data into saved state."""
    return SelfCheckError(
        f"Training passes write {name}, and no noise covers it. Set track_running_stats=False, a buffer's persistent=False, or "
        "write weights in optimizer.register_step_post_hook; nothing was released."
    )


def unreleased_change(name: str) -> RuntimeError:
    """The refusal of a write outside of releases."""
    return RuntimeError(
        f"{name} was changed outside of a release. Write weights in optimizer.register_step_post_hook; after loading some, "
        "call private.load_state_dict or detach()."
    )


def out_of_memory(rows: int) -> torch.OutOfMemoryError:
    """The error of a pass over ``rows`` rows that do not fit into memory."""
    remedy = "Pass a smaller max_physical_batch_size" if rows > 1 else "Shorten examples or train fewer parameters"
    return torch.OutOfMemoryError(f"The device has too little memory for {rows} row{'s' * (rows > 1)}. {remedy}.")
