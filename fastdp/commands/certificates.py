"""The commands about certificates that `fastdp split` and `fastdp federated` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastdp.commands.refusal import console, refusing

Folder = Annotated[Path, typer.Argument(help="folder of the authority and of every end")]


def add_certificate_commands(app: typer.Typer, server: str) -> None:
    """Add ``renew`` and ``revoke`` to an app whose server is called so."""

    @app.command("renew")
    @refusing
    def renew_command(
        folder: Folder,
        name: Annotated[list[str], typer.Option(help="name of an end; may be repeated")],
        days: Annotated[int, typer.Option(help="how long certificates are valid", min=1)] = 365,
    ) -> None:
        """Write new keys and certificates for ends that have one. The old ones stay valid until they expire."""
        from fastdp.tls import renew_certificates

        for path in renew_certificates(folder, name, days):
            console.print(f"wrote {path}")

    @app.command("revoke")
    @refusing
    def revoke_command(
        folder: Folder, name: Annotated[list[str], typer.Option(help="name of a client; may be repeated")]
    ) -> None:
        """Take back every certificate of a client. A running server follows its list within seconds."""
        from fastdp.tls import REVOKED, revoke_certificates

        path = revoke_certificates(folder, name, server)
        console.print(f"wrote {path}: the {server} needs it as {REVOKED} in its own folder of certificates")
