"""The Flower app of this install, and whether a bundle that a server sends is that app.

A SuperNode runs whatever app its server sends, on the node's own texts: it must therefore refuse every other app.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import lru_cache
from importlib import resources
from pathlib import Path

#: Most bytes of a bundle, packed and unpacked: ours has some thousands.
_MAX_BYTES = 1 << 20
#: Flower derives this list of files from the others.
_MANIFEST = ".info/CONTENT"


def app_folder() -> Path:
    """The folder for ``flwr run``."""
    return Path(str(resources.files("fastdp.federated") / "app"))


def bundle_digest(bundle: bytes) -> str:
    """SHA-256 of the names and contents of a Flower app bundle, in hex, however they are compressed.

    Raises ValueError for what is no bundle, is too large, or names a file twice.
    """
    if len(bundle) > _MAX_BYTES:
        raise ValueError(f"the app has {len(bundle)} bytes: {_MAX_BYTES} is the most")
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            entries = archive.infolist()
            if (
                len({entry.filename for entry in entries}) != len(entries)
                or sum(e.file_size for e in entries) > _MAX_BYTES
            ):
                raise ValueError("the app names a file twice, or is too large")
            contents = {entry.filename: archive.read(entry) for entry in entries}
    # zipfile raises NotImplementedError for a compression that it does not know, and RuntimeError for an encrypted file.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"the app cannot be opened: {type(error).__name__}") from None
    contents.pop(_MANIFEST, None)
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{len(name.encode())}:{name}:{len(contents[name])}:".encode() + contents[name])
    return digest.hexdigest()


@lru_cache(maxsize=1)
def own_digest() -> str:
    """`bundle_digest` of this install's app, as Flower bundles it here."""
    from flwr.cli.build import build_fab_from_disk

    return bundle_digest(build_fab_from_disk(app_folder()))


def check_bundle(bundle: bytes) -> None:
    """Raises ValueError for any app but this install's."""
    found = bundle_digest(bundle)
    if found != own_digest():
        raise ValueError(
            f"the server sent another app ({found[:16]}) than this install's ({own_digest()[:16]}): both must have one version"
        )
