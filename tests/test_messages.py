"""Errors say what happened and what to do in at most 25 words."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 25


def text(node: ast.AST, known: Mapping[str, str]) -> str:
    """What an expression says, with one word for each value that is put in; empty where nobody can tell."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text(part, known) or "value" for part in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left, known) + text(node.right, known)
    if isinstance(node, ast.IfExp):
        return max(text(node.body, known), text(node.orelse, known), key=len)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return text(node.func.value, known)
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """The place and the text of each error that a module raises or makes."""
    tree = ast.parse(path.read_text())
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    known = {n.targets[0].id: text(n.value, {}) for n in assigned if isinstance(n.targets[0], ast.Name)}
    for node in ast.walk(tree):
        made = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
        if isinstance(made, ast.Call) and made.args and ast.unparse(made.func).endswith("Error"):
            yield f"{path.relative_to(ROOT)}:{made.lineno}", text(made.args[0], known)


def test_no_message_is_longer() -> None:
    every = [found for path in sorted((ROOT / "fastdp").rglob("*.py")) for found in messages(path)]
    assert len(every) > 500
    assert not [f"{place} {said}" for place, said in every if len(said.split()) > MOST]
