"""What the site needs beside the pages of this folder: those of the root, and a page for each public name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Pages of the root, and what they are called on the site.
BESIDE = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages and the reference, which follows the pages that mkdocs.yml lists."""
    for name, page in BESIDE.items():
        text = re.sub(r"(\]\(|src=\")docs/", r"\1", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=_linked(text)))
    names = _public()
    for name, module in names:
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {name}\n\n::: {module}\n"))
    config.nav.append({"Reference": [{name: f"reference/{name}.md"} for name, _ in names]})
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the root's files lead to their pages here."""
    return _linked(markdown)


def _linked(text: str) -> str:
    for name, page in BESIDE.items():
        text = text.replace(f"](../{name}", f"]({page}").replace(f"]({name}", f"]({page}")
    return text


def _public() -> list[tuple[str, str]]:
    """Each public name with the place it is defined in, read without importing anything."""
    tree = ast.parse((ROOT / "fastdp" / "__init__.py").read_text())
    values = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("__all__", "_HOMES")
    }
    return [
        (name, f"{values['_HOMES'].get(name, 'fastdp')}.{name}") for name in sorted(values["__all__"], key=str.lower)
    ]
