"""Measure how large the package is, and what a reader meets on the way of a step: ``python -m bench.house [--json PATH]``."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import record

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("fastdp", "kernels", "csrc")
PAGES = ("README.md", "SECURITY.md", *(f"docs/{name}.md" for name in ("decisions", "attacks", "results", "kernels")))
#: The largest that each figure is meant to become.
GOALS = {
    "files of a steady step": 35,
    "calls in a steady step": 1800,
    "calls in the first step": 40_000,
    "floors in fastdp/engine": 7,
    "lines of the longest function of make_private": 60,
    "functions over 60 lines": 0,
    "words of README.md": 900,
    "words of SECURITY.md": 900,
    "words of docs/decisions.md": 2500,
    "words of docs/attacks.md": 1200,
    "words of docs/results.md": 3500,
    "words of docs/kernels.md": 2500,
    "words of all documents": 40_000,
    "lines of the library": 44_000,
    "lines of bench": 7500,
    "lines of tests": 28_000,
}


def tracked(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines()]


def lines(*folders: str) -> int:
    code = (path for path in tracked(*folders) if path.suffix in (".py", ".pyi", ".cpp", ".h", ".inc"))
    return sum(path.read_text().count("\n") for path in code)


def words(path: Path) -> int:
    """Words of a page, as ``wc -w`` counts them."""
    return len(path.read_text().split())


def floors(folder: str) -> int:
    """The longest chain of imports: among the packages and files of a folder, or within one of its packages."""
    root = ROOT / folder
    paths = [path.relative_to(root) for path in tracked(folder) if path.suffix == ".py" and path.stem != "__init__"]
    prefix = folder.replace("/", ".") + "."

    def longest(inside: tuple[str, ...]) -> int:
        """The longest chain among what a package holds: its files, and its packages as wholes."""
        depth = len(inside)
        below: dict[str, set[str]] = {}
        for path in paths:
            parts = path.with_suffix("").parts
            if parts[:depth] != inside:
                continue
            found = below.setdefault(parts[depth], set())
            for node in ast.walk(ast.parse((root / path).read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
                    other = tuple(str(node.module).removeprefix(prefix).split("."))
                    if other[:depth] == inside and len(other) > depth and other[depth] != parts[depth]:
                        found.add(other[depth])

        @functools.cache
        def height(name: str) -> int:
            return 1 + max((height(other) for other in below[name]), default=0)

        return max(map(height, below))

    packages = {path.parent.parts for path in paths if path.parent != Path(".")}
    return max(map(longest, ((), *packages)))


def functions(*folders: str) -> Iterator[tuple[str, int]]:
    """Every function, and its lines without the docstring."""
    for path in tracked(*folders):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                yield f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - first.lineno + 1


def steps() -> dict[str, int]:
    """Files and calls of the library in the first step and in a later one: a Llama of two layers on a processor."""
    import torch
    import transformers
    from torch.utils.data import DataLoader

    import fastdp

    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data: Any = [{"input_ids": row, "labels": row} for row in torch.randint(0, 100, (64, 16))]
    private = fastdp.make_private(
        *(model, optimizer, DataLoader(data, batch_size=8)),
        noise_multiplier=1.0,
        target_delta=1e-4,
        epochs=1,
        sampling="shuffled",
    )
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in LIBRARY:
            calls[str(path)] += 1

    counts = []
    for batch in private.data_loader:
        calls.clear()
        sys.setprofile(note)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
        counts.append((len(calls), calls.total()))
    private.detach()
    # The last step ends the run: its weights are remembered.
    steady = counts[-2]
    return {
        "files of a steady step": steady[0],
        "calls in a steady step": steady[1],
        "calls in the first step": counts[0][1],
    }


def measure() -> dict[str, int]:
    documents = [path for path in tracked("README.md", "SECURITY.md", "docs") if path.suffix == ".md"]
    lengths = dict(functions("fastdp", "kernels"))
    entry = [count for name, count in lengths.items() if name.startswith(("fastdp/entry.py", "fastdp/builder.py"))]
    return {
        **steps(),
        "floors in fastdp/engine": floors("fastdp/engine"),
        "lines of the longest function of make_private": max(entry),
        "functions over 60 lines": sum(count > 60 for count in lengths.values()),
        **{f"words of {page}": words(ROOT / page) for page in PAGES},
        "words of all documents": sum(map(words, documents)),
        "lines of the library": lines(*LIBRARY),
        "lines of bench": lines("bench"),
        "lines of tests": lines("tests"),
    }


def main() -> None:
    arguments = record.parser_of(__doc__).parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure()
    for name, value in found.items():
        print(f"{name:48} {value:8,} {'of at most' if value <= GOALS[name] else 'over'} {GOALS[name]:,}")
    record.write(arguments.json, {name: {"is": value, "goal": GOALS[name]} for name, value in found.items()})


if __name__ == "__main__":
    main()
