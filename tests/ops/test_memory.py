"""Memory that a device has left."""

from pathlib import Path

import psutil
import pytest
import torch

from fastdp.ops import memory


def test_free_memory_is_the_machine_s_or_a_container_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert 0 < memory.free_bytes(device) <= psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert memory.free_bytes(device) > 1 << 20
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory.free_bytes(device) == 4000
