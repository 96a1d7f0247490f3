"""Examples in docstrings do what they show, and every public name has what the site's build asks for."""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parent.parent
MODULES = (
    "fastdp.accounting.accountants",
    "fastdp.accounting.calibration",
    "fastdp.accounting.card",
    "fastdp.accounting.events",
    "fastdp.accounting.exports",
    "fastdp.accounting.meaning",
    "fastdp.accounting.renyi",
    "fastdp.accounting.schedules",
    "fastdp.accounting.serialisation",
    "fastdp.accounting.verification",
    "fastdp.audit.attributes",
    "fastdp.audit.bound",
    "fastdp.audit.example_canaries",
    "fastdp.audit.extraction",
    "fastdp.audit.guessing",
    "fastdp.audit.inversion",
    "fastdp.audit.losses",
    "fastdp.audit.membership",
    "fastdp.audit.prove",
    "fastdp.audit.reconstruction",
    "fastdp.audit.repeated",
    "fastdp.entry",
    "fastdp.integrations.adapters",
    "fastdp.finetune.synthesis",
    "fastdp.methods.dpsgd.method",
    "fastdp.methods.options",
    "fastdp.methods.votes.mechanism",
    "fastdp.nn",
    "fastdp.ops.adamw",
    "fastdp.ops.bounds",
    "fastdp.ops.choice",
    "fastdp.ops.clip",
    "fastdp.ops.dchi",
    "fastdp.ops.heads",
    "fastdp.ops.instances",
    "fastdp.ops.noise",
    "fastdp.ops.norms",
    "fastdp.ops.snap",
    "fastdp.ops.stream",
    "fastdp.ops.sums",
    "fastdp.private.run",
    "fastdp.untrusted",
)


@pytest.mark.timeout(300)
@cases("name", MODULES)
def test_examples_do_what_they_show(name):
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried
    assert not failed


def test_no_example_is_left_out():
    texts = {path: path.read_text() for path in (ROOT / "fastdp").rglob("*.py")}
    assert {path for path, text in texts.items() if "    >>> " in text} == {
        ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in MODULES
    }


def test_the_sites_build_knows_what_a_page_must_say(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    for name, module in site.public_names():
        site.shown_in(name, site.docstring(name, module))
    assert len(site.members("accounting")) > 30
    assert len(site.members("ops")) > 20
    assert len(site.members("audit")) > 30
    shared = "What.\n\nArgs:\n    a, b: of both,\n        in two lines.\n    c: alone.\n\nRaises:\n    A, B: never."
    each = [f"    {name}: of both,\n        in two lines.\n" for name in "ab"]
    apart = shared.replace("    a, b: of both,\n        in two lines.\n", "".join(each))
    assert site.names_apart(shared) == apart
    (tmp_path / "fastdp").mkdir()
    (tmp_path / "fastdp" / "new.py").write_text('def new(x):\n    """Something."""\n')
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="does not say what it takes"):
        site.docstring("new", "fastdp.new.new")
    (tmp_path / "fastdp" / "ops").mkdir()
    (tmp_path / "fastdp" / "ops" / "__init__.py").write_text("from .new import new as new\n")
    (tmp_path / "fastdp" / "ops" / "new.py").write_text(
        'def new(x):\n    """Something.\n\n    Args:\n        x: a thing."""\n'
    )
    with pytest.raises(ValueError, match="does not say what it raises"):
        site.members("ops")
    (tmp_path / "fastdp" / "ops" / "new.py").write_text(
        'def new(x):\n    """Something.\n\n    Args:\n        x: a thing.\n\n    Raises ValueError."""\n'
    )
    with pytest.raises(ValueError, match="shows no example"):
        site.members("ops")
