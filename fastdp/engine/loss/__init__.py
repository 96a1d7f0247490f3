"""Each row's loss, and the gradient at the end of a model that starts its backward pass."""
