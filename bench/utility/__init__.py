"""Utility of the methods at a size a laptop can run: one module a paper, each with `main(arguments)`."""
