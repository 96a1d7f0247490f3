"""What is installed: the wheel carries its data and works away from the tree."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from fastdp.accounting import Card
from fastdp.distribution import wheel_digest
from tests.cases import cases

ROOT = Path(__file__).parent.parent


def test_constraints_pin_every_direct_dependency():
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for entries in project["optional-dependencies"].values() for entry in entries]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    for requirement in project["dependencies"] + extras:
        name = requirement.split(";")[0].split("[")[0].split(">")[0].strip().lower()
        assert name == "fastdp-lm" or name in pinned, f"{requirement} is not pinned in constraints.txt"


def test_the_oldest_versions_are_those_that_are_asked_for():
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(
        requirement.split(">=")
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["trainer"]]
        if ">=" in requirement
    )
    lines = (ROOT / "constraints-minimum.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if "==" in line)

    def same(one, other):
        return [int(part) for part in f"{one}.0.0".split(".")[:3]] == [
            int(part) for part in f"{other}.0.0".split(".")[:3]
        ]

    # Others are named where the newest does not go with these.
    assert oldest.keys() - {"pyarrow"} == asked.keys()
    assert all(same(oldest[name], version) for name, version in asked.items())


def test_a_torch_that_an_environment_has_is_held(tmp_path):
    """Where a newer triton had come with it, pip put the pinned one in its place, and an older torch that goes with that."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    subprocess.run(["make", "-s", f"VENV={tmp_path}", f"{tmp_path}/.torch"], cwd=ROOT, check=True)
    held = dict(line.split("==") for line in (tmp_path / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert held == pinned | {name: version(name) for name in ("torch", "triton")}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages that holds this one's root module beside whatever a test puts there."""
    (tmp_path / "fastdp").mkdir()
    shutil.copy(ROOT / "fastdp" / "__init__.py", tmp_path / "fastdp")
    return tmp_path


def imported(site):
    # Without site-packages, where an editable install would offer the tree.
    script = [sys.executable, "-S", "-c", "import fastdp"]
    return subprocess.run(script, cwd=site, env={"PYTHONPATH": str(site)}, capture_output=True, text=True)


def test_another_package_in_the_same_folder_is_refused_in_a_sentence(site):
    (site / "fastdp" / "privacy_engine.py").touch()
    done = imported(site)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: ")
    assert "also holds awslabs' fastDP" in done.stderr


def test_another_package_beside_is_told_apart_in_a_sentence(site):
    assert imported(site).stderr == ""
    (site / "fastDP").mkdir(exist_ok=True)
    (site / "fastDP" / "privacy_engine.py").touch()
    done = imported(site)
    assert done.returncode == 0
    assert done.stderr.count("awslabs' fastDP is installed too") == 1


def test_a_card_names_the_wheel_it_was_made_with(tmp_path, monkeypatch):
    """pip notes the digest of a wheel's file beside what it installs."""
    noted = tmp_path / "fastdp_lm-9.9.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: fastdp-lm\nVersion: 9.9\n")
    (noted / "direct_url.json").write_text(json.dumps({"archive_info": {"hashes": {"sha256": "ab" * 32}}}))
    monkeypatch.syspath_prepend(tmp_path)
    wheel_digest.cache_clear()
    try:
        card = Card.of(None, mechanism="none", noise_source={}, flaws=["a test"])
    finally:
        wheel_digest.cache_clear()
    assert card["software"]["fastdp"] == "9.9"
    assert card["software"]["fastdp_wheel"] == "sha256:" + "ab" * 32


@pytest.mark.slow
def test_wheel_works_outside_the_tree(tmp_path):
    """Built from a copy of the tracked files, unpacked elsewhere, used from there with this environment's packages."""
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, (entry.decode() for entry in files)):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = wheels.glob("fastdp_lm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "fastdp/quickstart/model/model.safetensors" in names
    assert "fastdp/kernels/__init__.py" in names
    assert not [name for name in names if name.startswith(("kernels/", "tests/", "bench/"))]
    script = (
        "import fastdp, fastdp.kernels, torch, sys\n"
        f"assert fastdp.__file__.startswith({str(site)!r}), fastdp.__file__\n"
        "x = fastdp.ops.add_noise_(torch.zeros(1000), 1.0, fastdp.NoiseStream())\n"
        "assert 0.5 < x.std() < 1.5\n"
        "from fastdp.quickstart.corpus import private_records\n"
        "assert private_records(2, 0)\n"
    )
    # PYTHONPATH comes before site-packages, and so before an editable install of the tree.
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)


@cases("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")))
def test_actions_are_pinned_by_commit(path):
    """A tag can be moved to other code by whoever holds, or takes, its repository."""
    used = re.findall(r"uses:\s*(\S+)", path.read_text())
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]


def test_a_release_states_where_it_comes_from():
    job = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]["release"]
    assert job["permissions"] == {"contents": "read", "id-token": "write", "attestations": "write"}
    used = {step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step}
    assert {"actions/attest-build-provenance", "actions/attest-sbom"} <= used


def test_an_sbom_has_the_hash_of_each_archive_that_pip_installed(tmp_path):
    """From pip's own report of a wheel; of what pip did not install nothing is known."""
    wheel = tmp_path / "Some_Thing-1.0-py3-none-any.whl"
    facts = {"METADATA": "Metadata-Version: 2.1\nName: Some_Thing\nVersion: 1.0\n", "RECORD": "",
             "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in facts.items():
            archive.writestr(f"Some_Thing-1.0.dist-info/{name}", text)
    report, sbom = tmp_path / "report.json", tmp_path / "sbom.json"
    install = ["install", "-q", "--dry-run", "--no-index", "--no-deps", "--ignore-installed", "--report", str(report)]
    subprocess.run([sys.executable, "-m", "pip", "--isolated", *install, str(wheel)], check=True)
    components = [{"name": "some-thing", "version": "1.0"}, {"name": "pip", "version": "23"}]
    sbom.write_text(json.dumps({"components": components}))
    subprocess.run([sys.executable, ROOT / "tests" / "sbom.py", sbom, report], check=True)
    known, unknown = json.loads(sbom.read_text())["components"]
    (reference,) = known["externalReferences"]
    assert reference["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}]
    assert "externalReferences" not in unknown
    for place in ("Makefile", ".github/workflows/wheels.yml"):
        assert "tests/sbom.py dist/sbom.json" in (ROOT / place).read_text()


def test_what_builds_a_wheel_is_pinned_by_hash():
    """And `make wheel` installs nothing into its tools in another way."""
    for name in ("build", "wheel"):
        lines = (ROOT / f"requirements-{name}.txt").read_text().replace("\\\n", " ").splitlines()
        entries = [line for line in lines if line and not line.startswith(("#", "-r "))]
        assert entries
        assert all(re.match(r"[\w.-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    rule = (ROOT / "Makefile").read_text().partition("\nwheel:")[2].partition("\n\n")[0]
    installs = [line for line in rule.splitlines() if "$(TOOLS)" in line and "install" in line]
    assert installs
    assert all("--require-hashes" in line for line in installs)
