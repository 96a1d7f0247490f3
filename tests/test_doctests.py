"""Examples in docstrings do what they show, and every public name has what the site's build asks for."""

import doctest
import importlib.util
from pathlib import Path

import pytest

import fastdp.accounting.card
import fastdp.accounting.events
import fastdp.accounting.exports
import fastdp.accounting.renyi
import fastdp.accounting.schedules
import fastdp.accounting.serialisation
import fastdp.accounting.verification
import fastdp.integrations.adapters
import fastdp.methods.dpsgd.method
import fastdp.methods.options
import fastdp.ops.stream
import fastdp.private.run

ROOT = Path(__file__).parent.parent
MODULES = (
    fastdp.accounting.card,
    fastdp.accounting.events,
    fastdp.accounting.exports,
    fastdp.accounting.renyi,
    fastdp.accounting.schedules,
    fastdp.accounting.serialisation,
    fastdp.accounting.verification,
    fastdp.integrations.adapters,
    fastdp.methods.dpsgd.method,
    fastdp.methods.options,
    fastdp.ops.stream,
    fastdp.private.run,
)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_do_what_they_show(module):
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried
    assert not failed


def test_no_example_is_left_out():
    texts = {path: path.read_text() for path in (ROOT / "fastdp").rglob("*.py")}
    assert {path for path, text in texts.items() if "    >>> " in text} == {Path(module.__file__) for module in MODULES}


def test_the_sites_build_knows_what_a_page_must_say(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    for name, module in site._public():
        site._shown_in(name, site._docstring(name, module))
    assert len(site._members("accounting")) > 30
    assert len(site._members("ops")) > 20
    (tmp_path / "fastdp").mkdir()
    (tmp_path / "fastdp" / "new.py").write_text('def new(x):\n    """Something."""\n')
    monkeypatch.setattr(site, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="does not say what it takes"):
        site._docstring("new", "fastdp.new.new")
    (tmp_path / "fastdp" / "ops").mkdir()
    (tmp_path / "fastdp" / "ops" / "__init__.py").write_text("from .new import new as new\n")
    (tmp_path / "fastdp" / "ops" / "new.py").write_text(
        'def new(x):\n    """Something.\n\n    Args:\n        x: a thing."""\n'
    )
    with pytest.raises(ValueError, match="does not say what it raises"):
        site._members("ops")
