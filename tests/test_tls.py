"""Who signs whom, who may read keys, and which certificates are turned down."""

import stat

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fastdp.tls import Credentials, check_certificate, make_certificates


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
    with pytest.raises(ValueError, match="cannot be read"):
        check_certificate(b"garbage")
    with pytest.raises(ValueError, match="has no certificates"):
        Credentials.load(tmp_path / "none")
    for name in ("vendor", "authority", "../up", "", "a b", ".", "x" * 65):
        with pytest.raises(ValueError, match="cannot name a customer"):
            make_certificates(tmp_path / "three", [name])
    assert not (tmp_path / "three").exists()
