"""Add the hash of each archive that pip installed to an SBOM, which `cyclonedx-py environment` cannot know.

`python tests/sbom.py SBOM REPORT...`, with reports of `pip install --report`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def main(sbom: str, *reports: str) -> None:
    archives = {}
    for report in reports:
        for entry in json.loads(Path(report).read_text())["install"]:
            name = re.sub(r"[-_.]+", "-", entry["metadata"]["name"]).lower()
            archives[name, entry["metadata"]["version"]] = entry["download_info"]
    found = json.loads(Path(sbom).read_text())
    for component in found["components"]:
        archive = archives.get((re.sub(r"[-_.]+", "-", component["name"]).lower(), component["version"]))
        if archive is None or "archive_info" not in archive:
            print(f"{component['name']} {component['version']}: no archive is known")
            continue
        sha256 = archive["archive_info"]["hashes"]["sha256"]
        reference = {"type": "distribution", "url": archive["url"], "hashes": [{"alg": "SHA-256", "content": sha256}]}
        component.setdefault("externalReferences", []).append(reference)
    Path(sbom).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
