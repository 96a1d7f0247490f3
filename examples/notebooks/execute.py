"""Execute the notebooks of this folder in place, as `make notebooks` does; each has four minutes.

python examples/notebooks/execute.py [FOLDER]
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

LIMIT = 240


def execute(path: Path) -> float:
    """Run a notebook from top to bottom and save it with its outputs; returns seconds. Raises if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        # Progress bars and warnings of libraries are no output of the notebook's.
        cell["outputs"] = (
            [out for out in cell.get("outputs", ()) if out.get("name") != "stderr"] if "outputs" in cell else []
        )
        if cell.cell_type != "code":
            del cell["outputs"]
    nbformat.write(notebook, path)
    return time.perf_counter() - begin


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for found in sorted(folder.glob("*.ipynb")):
        seconds = execute(found)
        print(f"{found.name}: {seconds:.0f} s", flush=True)
        assert seconds < LIMIT, f"{found.name} takes longer than {LIMIT} s"
