"""What a use of parameters is: where its rows lie, what its factors are, and what autograd keeps of it."""
