"""Direct preference optimization with trl on private pairs; the unit that is protected is a pair with its prompt.

    python examples/trl_dpo.py --model MODEL --output runs/dpo

MODEL is a folder or a name on the hub; without one, the small model that ships with fastdp is used. The texts are generated: of
each record the beginning is the prompt, and its own end is preferred to one that was generated apart.
"""

from datasets import Dataset
from trl import DPOConfig
from trl_sft import arguments, options, run

import fastdp
from fastdp.quickstart.corpus import private_records


def preferences(count: int) -> Dataset:
    """Pairs of a record's own end and that of a record which is nobody's: a pair holds one record."""
    columns: dict[str, list[str]] = {"prompt": [], "chosen": [], "rejected": []}
    for record, other in zip(private_records(count, seed=0), private_records(count, seed=1)):
        start, _, end = record.partition(";")
        columns["prompt"].append(start)
        columns["chosen"].append(";" + end)
        columns["rejected"].append(";" + other.partition(";")[2])
    return Dataset.from_dict(columns)


def main() -> None:
    """Train on pairs, of which each is an example."""
    chosen = options(__doc__.splitlines()[0], "runs/trl-dpo").parse_args()
    run(fastdp.DPDPOTrainer, DPOConfig(**arguments(chosen)), preferences(chosen.examples), chosen, rows=16)


if __name__ == "__main__":
    main()
