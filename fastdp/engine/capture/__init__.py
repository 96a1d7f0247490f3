"""A model's own passes, followed: which layers ran, and on what."""
