"""`fastdp doctor`: what this machine has, and how each trained parameter of a model would be handled."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer
from rich.table import Table

from fastdp.commands.flags import choice_of
from fastdp.commands.refusal import console, quiet_libraries, refusing, style_message
from fastdp.distribution import installed_version, version_of, wheel_digest

PACKAGES = "torch transformers peft accelerate datasets opacus dp-accounting prv-accountant triton".split()


@refusing
def doctor_command(
    model: Annotated[str | None, typer.Argument()] = None,
    task: Annotated[str, choice_of("task")] = "causal-lm",
    peft: Annotated[str, choice_of("peft")] = "full",
    length: Annotated[int, typer.Option(min=1, help="tokens of an example, for the costs")] = 64,
) -> None:
    """Report the environment; with a model, each trained parameter's uses, route and cost, or why it has none.

    MODEL: folder or name of a Hugging Face model.
    """
    quiet_libraries()
    console.print(_environment())
    if model is not None:
        _describe(model, task, peft, length)


def _environment() -> Table:
    import torch

    import fastdp._native as _native

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    wheel = f", of the wheel with SHA-256 {wheel_digest()}" if wheel_digest() else ""
    table.add_row("fastdp", (installed_version() or "on the path, not installed") + wheel)
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in PACKAGES:
        table.add_row(package, version_of(package) or style_message(("not installed", "dim")))
    table.add_row("instruction set", f"{_native.isa()} (of the C++ kernels, chosen at run time)")
    table.add_row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            table.add_row(
                f"cuda:{index}",
                f"{properties.name}, {memory:.0f} GiB, capability {properties.major}.{properties.minor}",
            )
    else:
        table.add_row("GPU", "none that torch can use")
    return table


def _describe(name: str, task: str, peft: str, length: int) -> None:
    import torch

    from fastdp.data import Collator
    from fastdp.finetune import FinetuneConfig
    from fastdp.finetune.config import LABELLED
    from fastdp.finetune.models import load_tokenizer, load_trained
    from fastdp.finetune.tasks import invented_label
    from fastdp.private.describe import describe

    labels = ["no", "yes"] if task in LABELLED else None
    config = FinetuneConfig(model=name, task=task, peft=peft, max_length=length, labels=labels)
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    ids = torch.randint(0, len(tokenizer), (3, length))
    examples = [
        {"input_ids": row, "labels": invented_label(config, row, number)} for number, row in enumerate(ids.tolist())
    ]
    rows = describe(model, Collator(0)(examples))
    console.print(f"{name}: {len(rows)} trained parameters ({peft})", soft_wrap=True)
    console.print("use; route to its per-example norm; time of the norms relative to its layer's own products")
    for row in rows:
        # Names are what a reader searches for: they stay whole, however narrow the output is.
        console.print(row.parameter, soft_wrap=True, highlight=False)
        console.print("  " + "; ".join(filter(None, row[1:])), soft_wrap=True, highlight=False)
