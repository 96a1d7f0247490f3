"""Examples in docstrings do what they show, and every public name has what the site's build asks for."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parent.parent
#: Every module of the package with an example in a docstring.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "fastdp").rglob("*.py")
    if "    >>> " in path.read_text()
)


@pytest.mark.timeout(300)
@cases("name", MODULES)
def test_examples_do_what_they_show(name):
    assert len(MODULES) > 35
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried
    assert not failed


def test_the_sites_build_knows_what_a_page_must_say(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    for name, module in site.public_names():
        site.shown_in(name, site.docstring(name, module))
    assert len(site.members("accounting")) > 30
    assert len(site.members("ops")) > 15
    assert len(site.members("audit")) > 30
    shared = "What.\n\nArgs:\n    a, b: of both,\n        in two lines.\n    c: alone.\n\nRaises:\n    A, B: never."
    each = [f"    {name}: of both,\n        in two lines.\n" for name in "ab"]
    apart = shared.replace("    a, b: of both,\n        in two lines.\n", "".join(each))
    assert site.names_apart(shared) == apart
    assert (
        site.fenced_examples("A.\n\n>>> f(\n...     1)\n  2\n\nB.")
        == "A.\n\n```pycon\n>>> f(\n...     1)\n  2\n```\n\nB."
    )
    (tmp_path / "fastdp" / "ops").mkdir(parents=True)
    (tmp_path / "fastdp" / "ops" / "__init__.py").write_text("from .new import new as new\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    takes = "\n\n    Args:\n        x: a thing."
    for text, words in (
        ("", "does not say what it takes"),
        (takes, "does not say what it raises"),
        (f"{takes}\n\n    Raises ValueError.", "shows no example"),
    ):
        (tmp_path / "fastdp" / "ops" / "new.py").write_text(f'def new(x):\n    """Something.{text}"""\n')
        with pytest.raises(ValueError, match=words):
            site.members("ops")
