"""`kernels` is a name that transformers looks for, and it is found when a program starts in the repository root."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_in_root(program):
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)


def test_a_transformers_model_from_the_root_and_ops_that_import_no_kernel_of_ours():
    run = run_in_root(
        "import sys\n"
        "from transformers import LlamaConfig, LlamaModel\n"
        "LlamaModel(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, "
        "num_attention_heads=1, num_key_value_heads=1))\n"
        "import fastdp.ops\n"
        "assert not [m for m in sys.modules if m.startswith('fastdp.kernels')], sys.modules.keys()\n"
        "import fastdp.kernels, kernels\n"
    )
    assert run.returncode == 0, run.stderr


def test_importing_kernels_imports_nothing_and_needs_no_triton():
    run = run_in_root(
        "import sys\nsys.modules['triton'] = None\nbefore = set(sys.modules)\nimport kernels\n"
        "assert set(sys.modules) - before == {'kernels'}, set(sys.modules) - before\n"
    )
    assert run.returncode == 0, run.stderr
