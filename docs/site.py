"""What the site needs beside the pages of this folder: those of the root, and a page for each public name."""

from __future__ import annotations

import re
from typing import Any

import reference
from griffe import Extension, Object
from mkdocs.structure.files import File, Files

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
        text = re.sub(r"(\]\(|src=\")docs/", r"\1", (reference.ROOT / name).read_text())
        files.append(File.generated(config, page, content=_linked(text)))
    names = reference.public_names()
    for name, module in names:
        docstring = reference.docstring(name, module)
        content = f"# {name}\n\n{reference.shown_in(name, docstring)}::: {module}\n"
        content += "".join(
            f"\n::: {home}.{member}\n" for member, home in reference.members(name)
        )
        if "as in `Options`" in docstring:
            content += "\n::: fastdp.methods.options.Options\n    options: { members: false }\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    config.nav.append(
        {"Reference": [{name: f"reference/{name}.md"} for name, _ in names]}
    )
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to the root's files lead to their pages here."""
    return _linked(markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Long words of a table may go on below after an underscore or a slash, and before a deviation."""

    def broken(cell: re.Match[str]) -> str:
        parts = re.split(r"(<[^>]+>)", cell[0])
        parts[::2] = [
            re.sub(r"(?<=\w[_/])(?=\w)|(?=±)", "<wbr>", text) for text in parts[::2]
        ]
        return "".join(parts)

    return re.sub(
        r"<t([dh])\b(?!(?:(?!</t\1>).)*<pre).*?</t\1>", broken, html, flags=re.DOTALL
    )


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page that would fetch anything from elsewhere fails the build: it must read the same without a network."""
    asked = re.findall(
        r'<(?:script|img|iframe|link rel="?stylesheet"?)\b[^>]*(?:src|href)="?(https?:[^"\s>]+)',
        output,
    )
    if asked:
        raise ValueError(
            f"{page.file.src_uri} would fetch {', '.join(asked)}: bring it along, or leave it out"
        )
    return output


class ReadableDocstrings(Extension):
    """Give names that share a line of a docstring a line each on their page, and show doctests as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Told of each object as it is read."""
        if obj.docstring is not None:
            text = reference.names_apart(obj.docstring.value)
            obj.docstring.value = reference.fenced_examples(text)


def _linked(text: str) -> str:
    for name, page in BESIDE.items():
        text = text.replace(f"](../{name}", f"]({page}").replace(
            f"]({name}", f"]({page}"
        )
    return text
