"""The commands about certificates that `fastdp split` and `fastdp federated` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastdp.commands.refusal import console, refusing

_HELP = """Write an authority, the {server}'s certificate and one for each {client}, each into a folder of its own.

FOLDER: where to write; what it has already is kept."""
Folder = Annotated[Path, typer.Argument()]


def add_certificate_commands(app: typer.Typer, server: str, client: str, default: str | None = None) -> None:
    """Add ``certificates``, ``renew`` and ``revoke`` to an app, by what it calls its server and a client.

    Without names, certificates are made for the client ``default``; None asks for names.
    """
    clients = typer.Option([default] if default else ..., f"--{client}", help=f"name of a {client}; may be repeated")

    @app.command("certificates", help=_HELP.format(server=server, client=client))
    @refusing
    def certificates_command(
        folder: Folder,
        name: list[str] = clients,
        host: Annotated[
            list[str] | None, typer.Option(help="name or address of the server's machine; may be repeated")
        ] = None,
        days: Annotated[int, typer.Option(help="how long certificates are valid", min=1)] = 365,
    ) -> None:
        from fastdp.tls import LOOPBACK_HOSTS, make_certificates

        made = make_certificates(folder, name, dict.fromkeys([*(host or []), *LOOPBACK_HOSTS]), days, server=server)
        for path in made:
            console.print(f"wrote {path}")
        if not made:
            console.print(f"{folder} has all of these already")

    @app.command("renew")
    @refusing
    def renew_command(
        folder: Folder,
        name: Annotated[list[str], typer.Option(help="name of an end; may be repeated")],
        days: Annotated[int, typer.Option(help="how long certificates are valid", min=1)] = 365,
    ) -> None:
        """Write new keys and certificates for ends that have one. The old ones stay valid until they expire.

        FOLDER: of the authority; ends' own folders may be away.
        """
        from fastdp.tls import renew_certificates

        for path in renew_certificates(folder, name, days):
            console.print(f"wrote {path}")

    @app.command("revoke")
    @refusing
    def revoke_command(
        folder: Folder, name: Annotated[list[str], typer.Option(help="name of a client; may be repeated")]
    ) -> None:
        """Take back every certificate of a client. A running server follows its list within seconds.

        FOLDER: of the authority; ends' own folders may be away.
        """
        from fastdp.tls import REVOKED, revoke_certificates

        path = revoke_certificates(folder, name, server)
        console.print(f"wrote {path}: the {server} needs it as {REVOKED} in its own folder of certificates")
