"""What is installed: the wheel carries its data and works away from the tree; nothing claims the name `kernels`."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_transformers_models_import_from_the_repository_root():
    """The root has a folder `kernels`, which transformers imports under that name if it is on the path."""
    script = "from transformers import LlamaConfig, LlamaForCausalLM; import fastdp.kernels, kernels"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_constraints_pin_every_direct_dependency():
    tomllib = pytest.importorskip("tomllib", reason="the standard library reads TOML from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [entry for entries in project["optional-dependencies"].values() for entry in entries]
    pinned = {
        line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    for requirement in project["dependencies"] + extras:
        name = requirement.split(";")[0].split("[")[0].split(">")[0].strip().lower()
        assert name == "fastdp" or name in pinned, f"{requirement} is not pinned in constraints.txt"


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
    (wheel,) = wheels.glob("fastdp-*.whl")
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
