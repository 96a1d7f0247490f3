"""Certificates for both ends: an authority of one's own, a server's certificate, and one for each client.

A client is who its certificate's common name says. Whoever holds the authority's key can make clients.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastdp.files as files

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ImportError("certificates need the cryptography package: pip install 'fastdp-lm[split]'") from None

AUTHORITY = "authority"
CA, CERTIFICATE, KEY = "ca.pem", "certificate.pem", "key.pem"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME_IN_WORDS = "1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit"
_AUTHORITY_DAYS = 3650
# Clocks differ between machines.
_EARLIER = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Credentials:
    """One end's own key and certificate, and the authority's certificate, in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes

    @classmethod
    def load(cls, folder: Path) -> Credentials:
        """From a folder that `make_certificates` wrote.

        Raises:
            ValueError: for files that are missing or no certificates; a certificate that has expired, is not valid yet, or
                was not signed by the authority beside it.
        """
        try:
            parts = [(folder / name).read_bytes() for name in (CA, CERTIFICATE, KEY)]
        except OSError as error:
            raise ValueError(
                f"{folder} has no certificates ({error.strerror}): fastdp split certificates makes them"
            ) from None
        check_certificate(parts[1], parts[0])
        return cls(*parts)


def check_certificate(certificate: bytes, authority: bytes | None = None) -> None:
    """Raises ValueError for a certificate that cannot be read, is not valid now, or is not signed by ``authority``."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
        issuer = None if authority is None else x509.load_pem_x509_certificate(authority)
    except ValueError:
        raise ValueError("the certificate cannot be read") from None
    now = datetime.datetime.now(datetime.timezone.utc)
    if now > found.not_valid_after_utc:
        raise ValueError(f"the certificate expired on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC: make a new one")
    if now < found.not_valid_before_utc:
        raise ValueError(
            f"the certificate is valid from {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on: check the clock"
        )
    if issuer is not None:
        try:
            found.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature):
            raise ValueError(
                "the certificate was not signed by the authority beside it: take both from one folder"
            ) from None


def make_certificates(
    folder: Path,
    clients: Iterable[str] = (),
    hosts: Iterable[str] = ("localhost", "127.0.0.1", "::1"),
    days: float = 365,
    *,
    server: str = "vendor",
) -> list[Path]:
    """Write what is missing of an authority, a server's certificate for ``hosts``, and one for each client.

    Each end's folder below ``folder`` has its name, holds its key, its certificate and the authority's certificate, and is
    what that end needs; ``authority`` stays with whoever admits clients. An authority that is there already signs new ones.

    Returns the folders that were written. Raises ValueError for a name that cannot be used.
    """
    clients = list(clients)
    for name in clients:
        if NAME.fullmatch(name) is None or name in (AUTHORITY, server):
            raise ValueError(f"{name!r} cannot name a customer: use {NAME_IN_WORDS}")
    authority = folder / AUTHORITY
    made = []
    if not (authority / KEY).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        # Of a name of its own: two authorities of one name would be taken for each other until a signature fails.
        certificate = _signed(f"fastdp authority {secrets.token_hex(4)}", key, None, None, _AUTHORITY_DAYS)
        _write(authority, key, certificate, certificate)
        made.append(authority)
    ca_key: Any = serialization.load_pem_private_key((authority / KEY).read_bytes(), None)
    ca = x509.load_pem_x509_certificate((authority / CA).read_bytes())
    for name, served in ((server, list(hosts)), *((name, []) for name in clients)):
        if not (folder / name / KEY).exists():
            key = ec.generate_private_key(ec.SECP256R1())
            _write(folder / name, key, _signed(name, key, ca, ca_key, days, served), ca)
            made.append(folder / name)
    return made


def _signed(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    ca_key: ec.EllipticCurvePrivateKey | None,
    days: float,
    hosts: Iterable[str] = (),
) -> x509.Certificate:
    """A certificate for ``name``, of an authority itself where ``ca`` is None."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if ca is None else ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=0 if ca is None else None), critical=True)
        .add_extension(_usage(ca is None), critical=True)
        # Strict readers, such as Python's own from 3.13 on, look for both identifiers.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if ca is not None:
        issuer: Any = ca.public_key()
        builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        hosts = list(hosts)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
    return builder.sign(key if ca_key is None else ca_key, hashes.SHA256())


def _usage(authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, ca: x509.Certificate) -> None:
    pem = serialization.Encoding.PEM
    for name, found in ((CERTIFICATE, certificate), (CA, ca)):
        files.write(folder / name, found.public_bytes(pem), public=True)
    # Last: a folder with a key is a whole one.
    files.write(folder / KEY, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
