"""What this package is called where it was installed from, and which wheel that was."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import metadata

#: awslabs' library is `fastDP`, which is the same name to pip and the same folder on disks that are blind to case.
DISTRIBUTION = "fastdp-lm"


def version_of(package: str) -> str | None:
    """The version of a package that was installed; None for one that was not, or is a tree on the path."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_version() -> str | None:
    """The version of this package, likewise."""
    return version_of(DISTRIBUTION)


@lru_cache(maxsize=1)
def wheel_digest() -> str | None:
    """SHA-256 (hex) of the wheel's file, as pip noted it; None where it came from an index or a tree (PEP 610)."""
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return json.loads(noted or "{}")["archive_info"]["hashes"]["sha256"]
    except (metadata.PackageNotFoundError, KeyError, TypeError, ValueError):
        return None
