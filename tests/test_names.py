"""One name has one definition, and none is a bare participle, adverb or preposition; errors say what to do in 25 words."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Words that say nothing of what they name.
BARE = set(
    """
    again alone along already among apart applied bare before behind beside besides between carried caught described
    down drawn during evaluated expanded given gone held joined kept known made met named nearest normed once others
    own placed reached said seen sent settled stacked still summed taken together told twice unread unscaled unseen
    whole within without
    """.split()
)
#: Names that every program, logger, type variable, and module that hands out names lazily, gives to the same thing.
CONVENTIONS = {"__all__", "__getattr__", "T", "app", "log", "main"}
#: Folders whose modules define the same things, each for its own device or kind of layer.
FAMILIES = (("fastdp/ops/", "kernels/"), ("fastdp/engine/rules/",))


def definitions():
    """Each name that a module defines, with the modules that define it."""
    found = defaultdict(set)
    for path in sorted(path for folder in ("fastdp", "kernels") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            else:
                continue
            for name in names:
                found[name].add(path.relative_to(ROOT).as_posix())
    return found


DEFINITIONS = definitions()


def meanings(modules):
    """How many things a name stands for: an op's definition, binding and kernels are one, and so are the rules' own."""
    families = {family for family in FAMILIES for module in modules if module.rpartition("/")[0] + "/" in family}
    return len(families) + sum(
        all(module.rpartition("/")[0] + "/" not in own for own in FAMILIES) for module in modules
    )


def test_a_public_name_has_one_definition():
    """A private name is its module's own; that no other module reads it is a rule of `tests/test_floors.py`."""
    several = {
        name: sorted(modules)
        for name, modules in DEFINITIONS.items()
        if not name.startswith("_") and name not in CONVENTIONS and meanings(modules) > 1
    }
    assert several == {}


def test_no_name_is_a_bare_participle_adverb_or_preposition():
    bare = {name: sorted(modules) for name, modules in DEFINITIONS.items() if name.strip("_").lower() in BARE}
    assert bare == {}


MOST = 25
#: What makes an error or a warning, or raises one with the text that it is given.
REFUSING = re.compile(
    r"(Error|Exceeded|Refused|Refusal|Rejected|Update|Use|Figure|Lost|Loss|error|warn)$|^_?(require|refuse)"
)


def text(node, known):
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


def messages(path):
    """The place and each text of the errors that a module raises or makes, and of its warnings."""
    tree = ast.parse(path.read_text())
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    known = {n.targets[0].id: text(n.value, {}) for n in assigned if isinstance(n.targets[0], ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and REFUSING.search(ast.unparse(node.func).rpartition(".")[2]):
            yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", text(part, known)) for part in node.args)


def test_no_message_is_longer():
    every = [
        found
        for folder in ("fastdp", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in messages(path)
    ]
    assert len(every) > 1000
    assert not [f"{place} {said}" for place, said in every if len(said.split()) > MOST]
