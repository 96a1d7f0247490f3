"""A federation on one machine as it would be on several: a server under TLS and nodes with certificates of their own.

    python examples/federated/deploy.py --model MODEL --eval held_out.jsonl --output runs/federated \
        --client hospital=hospital.jsonl --client clinic=clinic.jsonl --client practice=practice.jsonl

Each client trains on its own file, whose private words are perturbed before anything else; the server sees adapters.
On several machines, run the commands that `launch.py` beside this file runs; docs/federated.md lists them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from launch import Federation

from fastdp.federated.bundle import app_folder


def main() -> None:
    """Start everything, run, print each round, stop everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True, help="held-out texts at the server")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--client", action="append", required=True, metavar="NAME=FILE", help="once for each client")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="what each client insists on; by default perturbation=selective and epsilon=8",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, as in pyproject.toml"
    )
    options = parser.parse_args()
    output = options.output.resolve()
    clients = dict(entry.split("=", 1) for entry in options.client)
    settings = {
        "model": str(options.model.resolve()),
        "eval": str(options.eval.resolve()),
        "output": str(output / "server"),
        "partition": "own",
        "min_clients": min(2, len(clients)),
        **_values(options.set),
    }
    policy = {"perturbation": "selective", "epsilon": 8.0} | _values(options.policy)
    with Federation(output / "flower") as federation:
        for index, (name, file) in enumerate(clients.items()):
            own = {"train": str(Path(file).resolve()), "state": str(output / name), "partition-id": index}
            own["model"] = settings["model"]
            federation.add_client(name, own | policy)
        log = federation.run(app_folder(), settings)
    rounds = output / "server" / "rounds.jsonl"
    if not rounds.exists():
        raise SystemExit(log[-4000:])
    for row in map(json.loads, rounds.read_text().splitlines()):
        print(f"round {row['round']}: {row['accepted']} updates, perplexity {row['perplexity']:.2f}")
    print(f"cards: {output / 'server' / 'run_card.md'} and one below each client's folder")


def _values(entries: list[str]) -> dict[str, object]:
    """KEY=VALUE entries as settings."""
    return {key: _value(value) for key, value in (entry.split("=", 1) for entry in entries)}


def _value(text: str) -> object:
    """A JSON value, or the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


if __name__ == "__main__":
    main()
