"""A launcher's environment of two processes without a group: each would draw its own noise and count its own steps"""

import os
import unittest.mock

from . import kit, systems


def attack(library: systems.FastDP) -> float:
    with unittest.mock.patch.dict(os.environ, {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}):
        library.start(kit.Task(kit.Net), kit.records(), 1.0)
    return 2.0
