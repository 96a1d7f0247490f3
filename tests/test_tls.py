"""Who signs whom, who may read keys, and which certificates are turned down."""

import datetime
import os
import shutil
import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fastdp import tls
from fastdp.tls import (
    Credentials,
    Revocations,
    certificate_name,
    check_certificate,
    make_certificates,
    renew_certificates,
    revoke_certificates,
)


def certificate_of(folder):
    return x509.load_pem_x509_certificate((folder / "certificate.pem").read_bytes())


def test_each_end_has_its_own(tmp_path):
    made = make_certificates(tmp_path, ["alice", "bob"], ["vendor.example", "10.0.0.1"])
    assert [path.name for path in made] == ["authority", "vendor", "alice", "bob"]
    ca = x509.load_pem_x509_certificate((tmp_path / "authority" / "ca.pem").read_bytes())
    for path in made:
        assert stat.S_IMODE((path / "key.pem").stat().st_mode) == 0o600
        certificate_of(path).verify_directly_issued_by(ca)
        assert Credentials.load(path).key == (path / "key.pem").read_bytes()
    alice, vendor = certificate_of(tmp_path / "alice"), certificate_of(tmp_path / "vendor")
    assert alice.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == "alice"
    purposes = [list(c.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) for c in (alice, vendor)]
    assert purposes == [[ExtendedKeyUsageOID.CLIENT_AUTH], [ExtendedKeyUsageOID.SERVER_AUTH]]
    names = vendor.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["vendor.example"]
    # Again with one more: nothing that is there changes.
    before = (tmp_path / "alice" / "key.pem").read_bytes()
    assert [path.name for path in make_certificates(tmp_path, ["alice", "carol"])] == ["carol"]
    assert (tmp_path / "alice" / "key.pem").read_bytes() == before
    certificate_of(tmp_path / "carol").verify_directly_issued_by(ca)


def test_certificates_that_are_turned_down(tmp_path):
    make_certificates(tmp_path / "one", ["alice"])
    make_certificates(tmp_path / "two", ["alice"])
    make_certificates(tmp_path / "one", ["late"], days=-1)
    with pytest.raises(ValueError, match="expired on"):
        Credentials.load(tmp_path / "one" / "late")
    (tmp_path / "one" / "alice" / "ca.pem").write_bytes((tmp_path / "two" / "alice" / "ca.pem").read_bytes())
    with pytest.raises(ValueError, match="not signed by the authority"):
        Credentials.load(tmp_path / "one" / "alice")
    for context, end, said in (
        (tls.server_context, "alice", "a client's certificate: name the server's"),
        (tls.client_context, "vendor", "a server's certificate: name the client's"),
    ):
        with pytest.raises(ValueError, match=said):
            context(tmp_path / "two" / end)
    make_certificates(tmp_path / "two", hosts=["localhost"])
    with pytest.raises(ValueError, match="is not for vendor.example: remove that folder"):
        make_certificates(tmp_path / "two", hosts=["localhost", "vendor.example"])
    with pytest.raises(ValueError, match="cannot be read"):
        check_certificate(b"garbage")
    with pytest.raises(ValueError, match="has no certificates"):
        Credentials.load(tmp_path / "none")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "ca.pem")
    with pytest.raises(ValueError, match="no regular file"):
        Credentials.load(tmp_path / "pipe")
    for name in ("vendor", "authority", "../up", "", "a b", ".", "x" * 65):
        with pytest.raises(ValueError, match="cannot name a client"):
            make_certificates(tmp_path / "three", [name])
    assert not (tmp_path / "three").exists()


def signed(folder, *names):
    """A certificate of an authority whose subject has these common names."""
    ca = x509.load_pem_x509_certificate((folder / "authority" / "ca.pem").read_bytes())
    key = load_pem_private_key((folder / "authority" / "key.pem").read_bytes(), None)
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = x509.CertificateBuilder(
        ca.subject,
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]),
        key.public_key(),
        x509.random_serial_number(),
        now,
        now + datetime.timedelta(days=1),
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def test_a_name_is_parsed_whole(tmp_path):
    """A C string would end at the NUL, and make its holder alice."""
    make_certificates(tmp_path, ["alice"])
    assert certificate_name((tmp_path / "alice" / "certificate.pem").read_bytes()) == "alice"
    for names in (["alice\0.mallory"], ["alice", "bob"], [], ["../alice"], ["alice\n"], ["x" * 64, "y"]):
        with pytest.raises(ValueError, match="one common name"):
            certificate_name(signed(tmp_path, *names))


def test_renewed_and_revoked(tmp_path):
    make_certificates(tmp_path, ["alice", "bob"], ["vendor.example", "10.0.0.1"])
    first = (tmp_path / "alice" / "certificate.pem").read_bytes()
    server = certificate_of(tmp_path / "vendor")
    assert renew_certificates(tmp_path, ["alice", "vendor"]) == [tmp_path / "alice", tmp_path / "vendor"]
    second = Credentials.load(tmp_path / "alice").certificate
    names = [
        c.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        for c in (server, certificate_of(tmp_path / "vendor"))
    ]
    assert names[0] == names[1]
    revoked = Revocations(tmp_path / "vendor")
    revoked.check(first)
    assert revoke_certificates(tmp_path, ["alice"]) == tmp_path / "authority" / "revoked.pem"
    for certificate in (first, second):
        with pytest.raises(ValueError, match="revoked"):
            revoked.check(certificate)
    bob = (tmp_path / "bob" / "certificate.pem").read_bytes()
    revoked.check(bob)
    # A new one after that is good, and the next revocation keeps the earlier ones.
    shutil.rmtree(tmp_path / "alice")
    renew_certificates(tmp_path, ["alice"])
    revoked.check((tmp_path / "alice" / "certificate.pem").read_bytes())
    # Its owner has the folder, and nobody else.
    shutil.rmtree(tmp_path / "bob")
    revoke_certificates(tmp_path, ["bob"])
    for certificate in (first, second, bob):
        with pytest.raises(ValueError, match="revoked"):
            revoked.check(certificate)
    for name in ("carol", "vendor", "../alice"):
        with pytest.raises(ValueError, match="has no certificate|cannot name"):
            revoke_certificates(tmp_path, [name])
    with pytest.raises(ValueError, match="has no certificate"):
        renew_certificates(tmp_path, ["carol"])


def test_a_list_that_cannot_be_believed_lets_nobody_in(tmp_path):
    make_certificates(tmp_path / "one", ["alice"])
    make_certificates(tmp_path / "two", ["alice"])
    revoke_certificates(tmp_path / "one", ["alice"])
    alice = (tmp_path / "two" / "alice" / "certificate.pem").read_bytes()
    revoked = Revocations(tmp_path / "two" / "vendor")
    revoked.check(alice)
    (tmp_path / "two" / "vendor" / tls.REVOKED).write_bytes((tmp_path / "one" / "vendor" / tls.REVOKED).read_bytes())
    with pytest.raises(ValueError, match="no list of revoked"):
        revoked.check(alice)
    (tmp_path / "two" / "vendor" / tls.REVOKED).write_bytes(b"garbage")
    with pytest.raises(ValueError, match="no list of revoked"):
        revoked.check(alice)
    known = Revocations(tmp_path / "one" / "vendor")
    known.check((tmp_path / "one" / "vendor" / "certificate.pem").read_bytes())
    (tmp_path / "one" / "vendor" / tls.REVOKED).unlink()
    with pytest.raises(ValueError, match="is gone"):
        known.check(alice)
