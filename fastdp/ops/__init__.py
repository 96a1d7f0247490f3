"""The kernels as functions on tensors of any device. Each module keeps an op's schema, contract and definition together."""
