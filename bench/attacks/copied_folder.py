"""A copy of a run's folder is trained on beside the original: one run, two branches, each card half of what was released"""

import shutil
import tempfile
from pathlib import Path

from . import systems


def attack(fastdp: systems.FastDP) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder, copy = Path(name) / "run", Path(name) / "copy"
        fastdp.go_on(folder, 2, resume=False)
        shutil.copytree(folder, copy)
        fastdp.go_on(folder, 2, resume=True)
        accounted = fastdp.go_on(copy, 2, resume=True) + 2
        return 6 / accounted
