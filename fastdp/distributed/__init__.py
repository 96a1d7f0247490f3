"""Processes that train together: their ranks, tensors in pieces, and sharded parameters."""
