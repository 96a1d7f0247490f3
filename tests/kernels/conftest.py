"""Kernels run on CPU tensors only where Triton's interpreter was on when Triton was first imported."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# `test_interpreter.py` runs these in processes of their own; everything else needs kernels that compile.
collect_ignore_glob = ["test_*.py"] if INTERPRETED else ["interpreted/*"]
