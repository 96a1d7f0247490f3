"""What a run verifies of its batches before anything is released (docs/audit.md)."""

from fastdp.verify.checks import Checks as Checks
