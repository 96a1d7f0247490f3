"""What a run verifies of its batches before anything is released (SECURITY.md)."""

from fastdp.verify.checks import Checks as Checks
