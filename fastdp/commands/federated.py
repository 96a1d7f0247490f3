"""`fastdp federated`: certificates, the server's gateway to Flower, and a node."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from fastdp.commands.certificates import add_certificate_commands
from fastdp.commands.refusal import console, refusing
from fastdp.untrusted import MAX_YAML, read_text

federated_app = typer.Typer(
    help="Fine-tune on several organisations' texts with Flower: adapters travel, texts stay.", no_args_is_help=True
)
add_certificate_commands(federated_app, "server", "node")


@federated_app.command("server")
@refusing
def server_command(
    certificates: Annotated[Path, typer.Option(help="the server's own folder of certificates")],
    address: Annotated[str, typer.Option(help="host:port that nodes reach")] = "localhost:8000",
    folder: Annotated[Path, typer.Option(help="folder for Flower's settings and log")] = Path("federated-server"),
    port: Annotated[int, typer.Option(help="port of Flower itself, on this machine alone; 0 takes a free one")] = 0,
) -> None:
    """Run Flower on this machine alone, and let nodes with a certificate reach its Fleet API.

    Whoever reaches Flower itself is the server: every user of this machine.
    """
    from fastdp.federated.programs import serving

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with serving(address, certificates, folder, port=port) as (taken, superlink):
        console.print(f"nodes reach the Fleet API at {taken}, with a certificate")
        console.print("start a run on this machine with:")
        home = shlex.quote(str(folder.resolve() / "flower"))
        console.print(f'  FLWR_HOME={home} flwr run "$(fastdp federated app)" server --stream', soft_wrap=True)
        try:
            raise typer.Exit(superlink.wait())
        except KeyboardInterrupt:
            console.print("stopping: this takes up to half a minute")
            raise


@federated_app.command("node")
@refusing
def node_command(
    config: Annotated[Path, typer.Argument()],
    certificates: Annotated[Path, typer.Option(help="this node's own folder of certificates")],
    server: Annotated[str, typer.Option(help="host:port of the server")] = "localhost:8000",
) -> None:
    """Take part with texts of your own. No other app than this install's runs here.

    CONFIG: the node's settings (.toml): train, state, perturbation, epsilon, ...
    """
    from fastdp.federated.programs import program, run_node

    program("flower-supernode")
    import tomllib  # Python 3.11, which Flower needs too

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        settings = tomllib.loads(read_text(config, MAX_YAML))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{config} cannot be read: {error}") from None
    raise typer.Exit(run_node(server, certificates, settings))


@federated_app.command("app")
@refusing
def app_command() -> None:
    """Print the folder of this install's Flower app, for `flwr run`."""
    from fastdp.federated.bundle import app_folder

    typer.echo(str(app_folder()))
