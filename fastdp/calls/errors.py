"""The refusal of a batch, before anything of it is released."""


class SelfCheckError(RuntimeError):
    """One example's gradient depends on others, or on something that nothing accounts for; nothing was released."""
