"""Every kernel under Triton's interpreter: two processes of their own, since Triton reads the switch when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreted").glob("test_*.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("files", [FILES[::2], FILES[1::2]], ids=["odd", "even"])
def test_kernels_against_their_definitions(files):
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of this Triton turns arrays of one element into numbers, which numpy 2.4 refuses")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(command, cwd=HERE.parent.parent, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
