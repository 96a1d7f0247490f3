"""How a model is called: nested batches, modes, random draws, torch's functions by name, and marks of single tensors."""
