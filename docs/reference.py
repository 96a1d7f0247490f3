"""What the site's pages of public names say, read from the sources without importing anything."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def names_apart(docstring: str) -> str:
    """A docstring whose lists of arguments and attributes hold one name an entry, with the words that it shared."""
    several = re.compile(r"^( +)(\w+(?:, \w+)+)(:.*(?:\n\1 +.*)*)", re.MULTILINE)

    def apart(entry: re.Match[str]) -> str:
        return "\n".join(entry[1] + name + entry[3] for name in entry[2].split(", "))

    lists = re.compile(r"^(Args|Attributes):\n(?: +.*\n?)+", re.MULTILINE)
    return lists.sub(lambda section: several.sub(apart, section[0]), docstring)


def fenced_examples(docstring: str) -> str:
    """A docstring whose doctests are blocks of code: Markdown takes ``>>>`` for a quotation in a quotation."""
    return re.sub(
        r"^>>> .*(?:\n\S.*|\n +\S.*)*",
        "```pycon\n\\g<0>\n```",
        docstring,
        flags=re.MULTILINE,
    )


def public_names() -> list[tuple[str, str]]:
    """Each public name with the place it is defined in, read without importing anything."""
    tree = ast.parse((ROOT / "fastdp" / "__init__.py").read_text())
    values = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("_HOMES", "_MODULES")
    }
    homes = values["_HOMES"] | dict.fromkeys(values["_MODULES"], "fastdp")
    return [(name, f"{homes[name]}.{name}") for name in sorted(homes, key=str.lower)]


#: What a page of the reference must say, and how its docstring says it.
_MUST = {
    "what it takes": ("Args:", "Attributes:"),
    "what it raises": ("Raises:", "Raises "),
}


#: Packages whose every public name is on their page of the reference, each function with an example.
_PACKAGES = ("accounting", "audit", "ops")


def members(package: str) -> list[tuple[str, str]]:
    """What one of `_PACKAGES` imports as itself, each with the module that defines it; checked as public names are."""
    if package not in _PACKAGES:
        return []
    found = []
    for node in ast.parse((ROOT / "fastdp" / package / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            home = f"fastdp.{package}.{node.module}" if node.level else str(node.module)
            found += [(alias.name, home) for alias in node.names if alias.asname]
    for name, home in found:
        path = ROOT.joinpath(*home.split(".")).with_suffix(".py")
        definition = next(node for node in _definitions(path) if node.name == name)
        text = _complete(definition, path)
        if isinstance(definition, ast.FunctionDef) and ">>>" not in text:
            raise ValueError(
                f"the docstring of {name} ({path.relative_to(ROOT)}) shows no example"
            )
    return found


def _definitions(path: Path) -> list[ast.ClassDef | ast.FunctionDef]:
    return [
        node
        for node in _parsed(path.read_text()).body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]


#: Most modules are asked for many names.
_parsed = functools.cache(ast.parse)


def _complete(
    node: ast.ClassDef | ast.FunctionDef, path: Path, whole: bool = False
) -> str:
    """A definition's docstring. Raises ValueError, which fails the build, where it leaves out what a reader needs."""
    text = ast.get_docstring(node) or ""
    must = dict(_MUST)
    # Classes of the package's root say all of it.
    if isinstance(node, ast.ClassDef) and not whole:
        # What making one raises is said by whatever makes it; exceptions and abstract classes take nothing.
        del must["what it raises"]
        if not any(
            isinstance(field, ast.AnnAssign) and field.value is None
            for field in node.body
        ):
            must = {}
    elif isinstance(node, ast.FunctionDef) and not (
        node.args.args or node.args.kwonlyargs or node.args.vararg
    ):
        del must["what it takes"]
    for what, words in must.items():
        if not any(word in text for word in words):
            raise ValueError(
                f"the docstring of {node.name} ({path.relative_to(ROOT)}) does not say {what}"
            )
    if not text:
        raise ValueError(f"{node.name} ({path.relative_to(ROOT)}) has no docstring")
    return text


def docstring(name: str, module: str) -> str:
    """Of a public name. Raises ValueError, which fails the build, where it leaves out what a reader needs."""
    package = ROOT.joinpath(*module.split(".")[:-1])
    homes = (
        [package.with_suffix(".py")]
        if package.with_suffix(".py").exists()
        else sorted(package.rglob("*.py"))
    )
    if package.is_dir():
        # A method's settings may stand in the module beside its folder that all methods share.
        homes += sorted(package.parent.glob("*.py"))
    for home in homes:
        for node in _definitions(home):
            if node.name == name:
                return _complete(node, home, whole=True)
    if module == f"fastdp.{name}":
        return ""  # a module of the package
    raise ValueError(f"{module} is public, but not found where it is said to be")


def shown_in(name: str, text: str) -> str:
    """Pages whose code, which the tests run, uses a public name, or that name it; a docstring's own example will do instead."""
    pages = [
        page.name
        for page in sorted((ROOT / "docs").glob("*.md"))
        if f"`fastdp.{name}`" in page.read_text()
        or any(
            re.search(rf"\b{name}\b", block)
            for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        )
    ]
    programs = [
        f"`examples/{path.name}`"
        for path in sorted((ROOT / "examples").glob("*.py"))
        if re.search(rf"\b{name}\b", path.read_text())
    ]
    if not pages and programs:
        return f"Used in {', '.join(programs)}.\n\n"
    if pages:
        return (
            "Used in "
            + ", ".join(f"[{page.removesuffix('.md')}](../{page})" for page in pages)
            + ".\n\n"
        )
    if ">>>" not in text and text:
        raise ValueError(
            f"{name} is public, but neither its docstring nor any page shows its use"
        )
    return ""
