"""The `fastdp` command."""

from __future__ import annotations

from typing import Annotated

import typer

from fastdp.commands.attack import attack_command
from fastdp.commands.bench import bench_app
from fastdp.commands.doctor import doctor_command
from fastdp.commands.federated import federated_app
from fastdp.commands.planning import plan_command, tune_command
from fastdp.commands.privacy import calibrate_command, card_app, epsilon_command, verify_command
from fastdp.commands.privatize import privatize_command
from fastdp.commands.prove import prove_command
from fastdp.commands.split import split_app
from fastdp.commands.synthesize import synthesize_command
from fastdp.commands.training import finetune_command, quickstart_command, report_command
from fastdp.distribution import installed_version

_HELP = "Fine-tune language models on private data, and state exactly what privacy was bought."

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fastdp {installed_version() or 'from a source tree that is not installed'}")
        raise typer.Exit


@app.callback(help=_HELP)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Options of the command itself."""


app.command("quickstart")(quickstart_command)
app.command("finetune")(finetune_command)
app.command("plan")(plan_command)
app.command("tune")(tune_command)
app.command("report")(report_command)
app.command("synthesize")(synthesize_command)
app.command("calibrate")(calibrate_command)
app.command("epsilon")(epsilon_command)
app.command("verify")(verify_command)
app.command("doctor")(doctor_command)
app.command("privatize")(privatize_command)
app.command("attack")(attack_command)
app.command("prove")(prove_command)
app.add_typer(card_app, name="card")
app.add_typer(split_app, name="split")
app.add_typer(federated_app, name="federated")
app.add_typer(bench_app, name="bench")
