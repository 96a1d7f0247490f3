"""Norms, scales and sums of the gradients of units."""
