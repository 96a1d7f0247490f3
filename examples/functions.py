"""Write questions about Python's own library, and their answers, as files of every kind that `fastdp finetune` reads.

python examples/functions.py FOLDER

The answers are the first paragraphs of docstrings. A module stands for a person who wrote several rows.
"""

import csv
import importlib
import inspect
import json
import sys
from pathlib import Path

MODULES = """
argparse ast asyncio base64 bisect calendar cmath codecs collections configparser contextlib copy csv dataclasses datetime decimal
difflib email enum fractions functools gzip hashlib heapq html inspect io itertools json logging math mimetypes operator os
pathlib pickle platform pprint random re sched secrets shlex shutil socket sqlite3 statistics string struct subprocess tempfile
textwrap threading time timeit tokenize traceback types typing unicodedata unittest urllib.parse uuid warnings weakref zipfile
""".split()


def functions():
    """Yield (module, name, class, answer) for each public function and class with a docstring."""
    for module in MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            text = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            if text and getattr(value, "__module__", module) == module:
                yield module, name, "yes" if inspect.isclass(value) else "no", " ".join(text.split("\n\n")[0].split())


def write(folder: Path) -> int:
    """Write all files; returns the number of rows."""
    rows = list(functions())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "messages.jsonl", "w", encoding="utf-8") as file:
        for number, (module, name, _, answer) in enumerate(rows):
            messages = [{"role": "user", "content": f"What does {module}.{name} do?"}]
            if number % 2:
                # The assistant looks it up with a tool first.
                call = {"type": "function", "function": {"name": "help", "arguments": {"of": f"{module}.{name}"}}}
                messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
                messages += [{"role": "tool", "name": "help", "content": answer}]
            messages.append({"role": "assistant", "content": answer})
            file.write(json.dumps({"messages": messages}) + "\n")
    task = "Say what this function does."
    alpaca = [{"instruction": task, "input": f"{module}.{name}", "output": answer} for module, name, _, answer in rows]
    # Two shards in UTF-16, whose lines end as on an old Mac.
    for shard in range(2):
        text = json.dumps(alpaca[shard::2], indent=1, ensure_ascii=False)
        (folder / f"alpaca-{shard}.json").write_text(text, encoding="utf-16", newline="\r")
    with open(folder / "functions.csv", "w", newline="", encoding="latin-1", errors="replace") as file:
        csv.writer(file, delimiter=";").writerows([("module", "name", "class", "answer"), *rows])
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        print("functions.parquet needs pyarrow: pip install 'fastdp-lm[trainer]'")
    else:
        modules, names, classes, answers = map(list, zip(*rows))
        numbers = [("no", "yes").index(each) for each in classes]
        table = pyarrow.table({"kind": numbers, "module": modules, "name": names, "answer": answers})
        # Numbers with their names, as `datasets` writes a ClassLabel.
        kinds = {"kind": {"names": ["function", "class"], "_type": "ClassLabel"}}
        texts = {name: {"dtype": "string", "_type": "Value"} for name in ("module", "name", "answer")}
        features = json.dumps({"info": {"features": kinds | texts}})
        parquet.write_table(table.replace_schema_metadata({"huggingface": features}), folder / "functions.parquet")
    return len(rows)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "rows")
