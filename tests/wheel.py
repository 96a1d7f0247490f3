"""Run by `make wheel` where the wheel alone is installed, without compiler or source: what it must have brought along.

The kernels of the best instruction set that this processor has, and a first private step within a minute of processor time,
imports and all.
"""

import platform
import resource
import shutil
from pathlib import Path

import fastdp
from fastdp import _native as native
from fastdp.distribution import wheel_digest

assert not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "c++")), "a compiler is on the path"
assert "site-packages" in fastdp.__file__, fastdp.__file__
assert wheel_digest() is not None, "pip noted no digest of the wheel"

if platform.machine() == "x86_64" and Path("/proc/cpuinfo").exists():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    best = "avx512" if {"avx512f", "avx512dq", "avx512bw", "avx512vl"} <= flags else "portable"
    best = "avx2" if best == "portable" and {"avx2", "fma", "f16c"} <= flags else best
    assert native.isa() == best, f"the processor has {best}, the wheel runs {native.isa()}"

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from fastdp.quickstart import MODEL  # noqa: E402

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()  # its file holds float16
rows = [{"input_ids": torch.randint(1, 500, (32,))} for _ in range(64)]
loader = torch.utils.data.DataLoader([row | {"labels": row["input_ids"]} for row in rows], batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
private = fastdp.make_private(model, optimizer, loader, target_epsilon=8.0, target_delta=1e-3, epochs=1)
for batch in private.data_loader:
    model(**batch).loss.backward()
    optimizer.step()
    if private.last_step_done:
        break
usage = resource.getrusage(resource.RUSAGE_SELF)
seconds = usage.ru_utime + usage.ru_stime
print(
    f"first private step after {seconds:.1f} s of processor time, epsilon {private.epsilon():.3f}, kernels: {native.isa()}"
)
assert seconds < 60, "the first private step took more than a minute of processor time"
