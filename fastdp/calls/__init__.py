"""How a model is called: nested batches, collation, modes, random draws, torch's functions by name, marks of tensors."""
