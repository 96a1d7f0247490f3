"""Rules by family of operations: each file takes some of torch's functions apart into uses, and lists them in ``HANDLERS``."""
