"""Certificates for both ends: an authority of one's own, a server's certificate, and one for each client.

A client is who its certificate's common name says. Whoever holds the authority's key can make clients. What is renewed or
revoked is listed beside that key; a server reads the list of revoked certificates from its own folder.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import secrets
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastdp.files as files
from fastdp.untrusted import MAX_YAML, read_bytes

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
#: A certificate revocation list that the authority signed, and its record of every certificate it issued.
REVOKED, ISSUED = "revoked.pem", "issued.jsonl"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAME_IN_WORDS = "1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or digit"
#: A server's certificate is for its own machine's names too.
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
# Clocks differ between machines.
_CLOCK_SLACK = datetime.timedelta(hours=1)
#: What no certificate of ours is for.
_UNUSED_PURPOSES = (
    "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only".split()
)


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
            parts = [read_bytes(folder / name, MAX_YAML) for name in (CA, CERTIFICATE, KEY)]
        except OSError as error:
            raise ValueError(
                f"{folder} has no certificates ({error.strerror}): name this end's own folder, as `certificates` wrote it"
            ) from None
        check_certificate(parts[1], parts[0])
        return cls(*parts)


def check_certificate(certificate: bytes, authority: bytes | None = None) -> None:
    """Raises ValueError for a certificate that cannot be read, is not valid now, or is not signed by ``authority``."""
    found = _read(certificate)
    issuer = None if authority is None else _read(authority)
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


def certificate_name(certificate: bytes) -> str:
    """The one common name of a certificate in PEM or DER. Raises ValueError for none, several, or another than `NAME_PATTERN`.

    The name is parsed here and compared whole: a C string would end at a NUL.
    """
    found = _read(certificate).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(found) != 1 or not isinstance(found[0].value, str) or NAME_PATTERN.fullmatch(found[0].value) is None:
        raise ValueError(f"the certificate must have one common name, of {NAME_IN_WORDS}")
    return found[0].value


def server_context(folder: Path) -> ssl.SSLContext:
    """TLS 1.3 for a server that lets in holders of a certificate of its authority alone. Raises as `Credentials.load`."""
    context = _context(folder, ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session shows no certificate, and would outlive a revocation.
    context.num_tickets = 0
    return context


def client_context(folder: Path) -> ssl.SSLContext:
    """TLS 1.3 for a client with a certificate, which believes servers of its authority alone. Raises as `Credentials.load`."""
    return _context(folder, ssl.PROTOCOL_TLS_CLIENT)


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    _check_purpose(folder, Credentials.load(folder), protocol == ssl.PROTOCOL_TLS_SERVER)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(folder / CA)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    return context


def _check_purpose(folder: Path, own: Credentials, server: bool) -> None:
    """Raises ValueError for a client's certificate at a server, and the reverse."""
    try:
        found = _read(own.certificate).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if (ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH) not in found:
        one, other = ("server", "client") if server else ("client", "server")
        raise ValueError(f"{folder} holds a {other}'s certificate: name the {one}'s own folder")


class Revocations:
    """The certificates that an authority took back, as ``revoked.pem`` in a server's folder lists them.

    The file is read again when it changes, so a running server follows it. A file that was there once must stay.
    """

    def __init__(self, folder: Path):
        self._path, self._authority = folder / REVOKED, folder / CA
        self._stamp: tuple[int, int] | None = None
        self._serials: frozenset[int] = frozenset()

    def check(self, certificate: bytes) -> None:
        """Raises ValueError for a certificate (PEM or DER) that was revoked, and while the list cannot be believed."""
        self._update()
        if _read(certificate).serial_number in self._serials:
            raise ValueError("the certificate was revoked: ask whoever holds the authority for a new one")

    def _update(self) -> None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            if self._stamp is not None:
                raise ValueError(f"{self._path.name} is gone: put the list of revoked certificates back") from None
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp != self._stamp:
            self._serials = _revoked(self._path, _read(self._authority.read_bytes()))
            self._stamp = stamp


def _read(certificate: bytes) -> x509.Certificate:
    try:
        if certificate.lstrip().startswith(b"-----"):
            return x509.load_pem_x509_certificate(certificate)
        return x509.load_der_x509_certificate(certificate)
    except ValueError:
        raise ValueError("the certificate cannot be read") from None


def _revoked(path: Path, authority: x509.Certificate) -> frozenset[int]:
    """Serial numbers of a revocation list. Raises ValueError unless the authority signed it."""
    try:
        found = x509.load_pem_x509_crl(path.read_bytes())
        if not found.is_signature_valid(authority.public_key()):  # type: ignore[arg-type]
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(f"{path.name} is no list of revoked certificates that the authority signed") from None
    return frozenset(entry.serial_number for entry in found)


def make_certificates(
    folder: Path,
    clients: Iterable[str] = (),
    hosts: Iterable[str] = LOOPBACK_HOSTS,
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
        _check_name(name, server)
    authority = folder / AUTHORITY
    made = []
    if not (authority / KEY).exists():
        key = ec.generate_private_key(ec.SECP256R1())
        # Of a name of its own: two authorities of one name would be taken for each other until a signature fails.
        certificate = _signed(f"fastdp authority {secrets.token_hex(4)}", key, None, None, _AUTHORITY_DAYS)
        _write(authority, key, certificate, certificate)
        made.append(authority)
    issue, hosts = _Issuer(authority), list(hosts)
    end = folder / server
    if (end / KEY).exists():
        extensions = _read((end / CERTIFICATE).read_bytes()).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = [*LOOPBACK_HOSTS, *(str(entry.value) for entry in names)]
        if missing := [host for host in hosts if _host(host) not in map(_host, known)]:
            raise ValueError(
                f"the certificate in {end} is not for {missing[0]}: remove that folder, and run this again"
            )
    for name, served in ((server, hosts), *((name, []) for name in clients)):
        if not (folder / name / KEY).exists():
            made.append(issue(folder / name, days, served))
    return made


def renew_certificates(folder: Path, names: Iterable[str], days: float = 365) -> list[Path]:
    """Give each end of these names a new key and certificate, for the hosts that it had. The old ones stay valid.

    An end's folder may be away, with the end. Returns the folders that were written. Raises ValueError for a name that has no
    certificate.
    """
    issue = _Issuer(folder / AUTHORITY)
    hosts = {name: issue.issued(name)[-1]["hosts"] for name in names}
    return [issue(folder / name, days, served) for name, served in hosts.items()]


def revoke_certificates(folder: Path, names: Iterable[str], server: str = "vendor") -> Path:
    """Take back every certificate that these clients were ever issued; returns the list that the server must have.

    The list lies with the authority, and is copied to the server's folder if that is here.

    Raises:
        ValueError: for a name that was issued no certificate.
    """
    issue = _Issuer(folder / AUTHORITY)
    path = folder / AUTHORITY / REVOKED
    serials = set(_revoked(path, issue.ca) if path.exists() else ())
    for name in names:
        _check_name(name, server)
        serials |= {entry["serial"] for entry in issue.issued(name)}
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateRevocationListBuilder().issuer_name(issue.ca.subject)
    builder = builder.last_update(now).next_update(now + datetime.timedelta(days=_AUTHORITY_DAYS))
    for serial in sorted(serials):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        builder = builder.add_revoked_certificate(entry)
    content = builder.sign(issue.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    for end in (path.parent, folder / server):
        if end.is_dir():
            files.write(end / REVOKED, content, public=True)
    return path


class _Issuer:
    """An authority that is there. Raises ValueError if it is not, or cannot be read."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self.key: Any = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
        except (OSError, ValueError, TypeError):
            raise ValueError(
                f"{folder} has no authority's key: name the folder that `certificates` wrote, on the authority's machine"
            ) from None
        self.ca = _read((folder / CA).read_bytes())

    def __call__(self, end: Path, days: float, hosts: Iterable[str]) -> Path:
        """Write a new key and certificate for an end, named like its folder; first comes the record of it."""
        key = ec.generate_private_key(ec.SECP256R1())
        hosts = list(hosts)
        certificate = _signed(end.name, key, self.ca, self.key, days, hosts)
        with files.appending(self.folder / ISSUED) as log:
            log.write(json.dumps({"name": end.name, "serial": certificate.serial_number, "hosts": hosts}) + "\n")
        _write(end, key, certificate, self.ca)
        return end

    def issued(self, name: str) -> list[dict[str, Any]]:
        """The record of every certificate that was issued to a name. Raises ValueError for none."""
        path = self.folder / ISSUED
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [entry for entry in map(json.loads, lines) if entry["name"] == name]
        if not found:
            raise ValueError(f"{name!r} has no certificate of this authority: {path} lists the names that have one")
        return found


def _check_name(name: str, server: str) -> None:
    if NAME_PATTERN.fullmatch(name) is None or name in (AUTHORITY, server):
        raise ValueError(f"{name!r} cannot name a client: use {NAME_IN_WORDS}")


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
        .not_valid_before(min(now, end) - _CLOCK_SLACK)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=0 if ca is None else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                **dict.fromkeys(_UNUSED_PURPOSES, False),
                digital_signature=ca is not None,
                key_cert_sign=ca is None,
                crl_sign=ca is None,
            ),
            critical=True,
        )
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
