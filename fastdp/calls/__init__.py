"""How a model is called: nested batches, training and evaluation modes, and what a pass draws at random."""
