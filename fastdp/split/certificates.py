"""Certificates for both ends: an authority of one's own, the vendor's certificate, and one for each customer.

A customer is who its certificate's common name says. Whoever holds the authority's key can make customers.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdp.split.operations import NAME, NAME_IN_WORDS

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise ImportError("certificates need the cryptography package: pip install 'fastdp[split]'") from None

AUTHORITY, VENDOR = "authority", "vendor"
_CA, _CERTIFICATE, _KEY = "ca.pem", "certificate.pem", "key.pem"
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
            parts = [(folder / name).read_bytes() for name in (_CA, _CERTIFICATE, _KEY)]
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
    customers: Iterable[str] = (),
    hosts: Iterable[str] = ("localhost", "127.0.0.1", "::1"),
    days: float = 365,
) -> list[Path]:
    """Write what is missing of an authority, a vendor's certificate for ``hosts``, and one for each customer.

    Each end's folder below ``folder`` holds its key, its certificate and the authority's certificate, and is what that end
    needs; ``authority`` stays with whoever admits customers. An authority that is there already signs new ones.

    Returns the folders that were written. Raises ValueError for a customer's name that cannot be used.
    """
    customers = list(customers)
    for name in customers:
        if NAME.fullmatch(name) is None or name in (AUTHORITY, VENDOR):
            raise ValueError(f"{name!r} cannot name a customer: use {NAME_IN_WORDS}")
    authority = folder / AUTHORITY
    made = []
    if not (authority / _KEY).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        # Of a name of its own: two authorities of one name would be taken for each other until a signature fails.
        certificate = _signed(f"fastdp split authority {secrets.token_hex(4)}", key, None, None, _AUTHORITY_DAYS)
        _write(authority, key, certificate, certificate)
        made.append(authority)
    ca_key: Any = serialization.load_pem_private_key((authority / _KEY).read_bytes(), None)
    ca = x509.load_pem_x509_certificate((authority / _CA).read_bytes())
    for name, served in ((VENDOR, list(hosts)), *((name, []) for name in customers)):
        if not (folder / name / _KEY).exists():
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
    )
    if ca is not None:
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
    folder.mkdir(parents=True, exist_ok=True)
    pem = serialization.Encoding.PEM
    for name, found in ((_CERTIFICATE, certificate), (_CA, ca)):
        (folder / name).write_bytes(found.public_bytes(pem))
    # Last, and readable by its owner alone from the start: a folder with a key is a whole one.
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor = os.open(folder / _KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret)
