"""The service on a network: who is let in, what is refused with a reason, and that it goes on for the others."""

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from bench.record import write
from fastdp.split import Limits, MessageRejected, make_certificates
from fastdp.split.bottom import PackedBottom
from fastdp.split.channel import CUSTOMER, METHOD
from fastdp.split.connection import Connection
from fastdp.split.operations import replies
from fastdp.split.wire import Outgoing
from fastdp.tls import Credentials, renew_certificates, revoke_certificates
from tests.split.malformed import malformed
from tests.split.world import LIMITS, ask, make_vendor, noisy_rows

RESULT = Path(__file__).parents[2] / "bench" / "results" / "split" / "fuzz.json"


def send_raw(address, chunks, name="mallory", timeout=60.0, method=METHOD):
    """The answer's chunks to chunks as they are."""
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        return list(channel.stream_stream(method)(iter(chunks), timeout=timeout, metadata=((CUSTOMER, name),)))


def refusal_of(address, chunks, **options):
    with pytest.raises(grpc.RpcError) as error:
        send_raw(address, chunks, **options)
    return error.value.code().name, error.value.details()


def require_calls_ended(service):
    end = time.monotonic() + 60
    while service.calls and time.monotonic() < end:
        time.sleep(0.01)
    assert not service.calls


def fuzz(service, customer_of, corpus, examples):
    """Send so many malformed messages as mallory, who has a run, while alice trains. Returns the refusals by code."""
    texts, labels = corpus
    alice = customer_of(service, "alice")
    alice.send(texts, labels, noisy_rows(alice))
    mallory = customer_of(service, "mallory")
    mallory.send(texts, labels, noisy_rows(mallory))
    mallory.train(1)
    vendor = service.vendor
    ask(service, "mallory", Outgoing.of("forward", {"step": 3}, {"indices": torch.arange(4)}))
    run = vendor.customer("mallory").run
    before = {name: value.detach().clone() for name, value in run.parameters.items()}
    refused: dict[str, int] = {}
    channel = grpc.insecure_channel(service.address, [("grpc.max_send_message_length", -1)])
    exchange = channel.stream_stream(METHOD)
    files = None

    @given(malformed(vendor.served, step=3, count=len(texts)))
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    def send(chunks):
        nonlocal files
        with pytest.raises(grpc.RpcError) as error:
            list(exchange(iter(chunks), timeout=60.0, metadata=((CUSTOMER, "mallory"),)))
        code, details = error.value.code().name, error.value.details()
        assert code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "ABORTED", "ALREADY_EXISTS"), (code, details)
        assert 10 < len(details) < 400
        refused[code] = refused.get(code, 0) + 1
        files = files or len(os.listdir("/proc/self/fd"))

    send()
    channel.close()
    assert sum(refused.values()) >= examples
    assert vendor.customer("mallory").run is run
    assert (run.step, vendor.customer("mallory").store.count) == (3, len(texts))
    assert all(torch.equal(value, before[name]) for name, value in run.parameters.items())
    # Nothing is left of the calls (which end after the caller has its answer): no places, no batches, no open files.
    require_calls_ended(service)
    assert vendor._places._value == vendor.limits.queue
    assert len(os.listdir("/proc/self/fd")) <= files + 8
    assert vendor.customer("mallory").forward_pass is not None
    assert len(alice.train(1)) == len(mallory.train(2)) == 3
    return refused


def test_malformed_messages(service, customer_of, corpus):
    fuzz(service, customer_of, corpus, 100)


@pytest.mark.slow
def test_ten_thousand_malformed_messages(service, customer_of, corpus):
    refused = fuzz(service, customer_of, corpus, 10_000)
    write(RESULT, {"messages": sum(refused.values()), "accepted": 0, "refused_by_code": refused})


def test_refusals_of_the_transport(service):
    good = list(Outgoing("describe"))
    assert send_raw(service.address, good)
    code, reason = refusal_of(service.address, good, timeout=None)
    assert (code, "deadline" in reason) == ("INVALID_ARGUMENT", True)
    code, reason = refusal_of(service.address, good, timeout=10_000)
    assert (code, "at most 600" in reason) == ("INVALID_ARGUMENT", True)
    assert refusal_of(service.address, [bytes(3 << 20)])[0] == "RESOURCE_EXHAUSTED"
    assert refusal_of(service.address, good, method="/fastdp.split/Other")[0] == "UNIMPLEMENTED"
    assert refusal_of(service.address, good, name="no/name")[0] == "UNAUTHENTICATED"
    assert send_raw(service.address, good)


def test_an_unforeseen_error_ends_one_call(service, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a secret of the vendor's")

    monkeypatch.setitem(service.vendor._operations, "describe", fail)
    code, reason = refusal_of(service.address, Outgoing("describe"))
    assert code == "INTERNAL"
    assert "secret" not in reason
    monkeypatch.undo()
    assert send_raw(service.address, Outgoing("describe"))


def test_a_customer_that_stalls_holds_its_own_places_alone(tmp_path):
    """A message that never ends is cut at its deadline; until then its sender has one call fewer, and nobody else has."""
    limits = Limits(**{**vars(LIMITS), "calls": 1})
    with make_vendor(tmp_path, limits=limits).serve("127.0.0.1:0", insecure=True) as service:
        (first,) = Outgoing("describe")
        ended = threading.Event()

        def slowly():
            yield first
            ended.wait(100)

        assert refusal_of(service.address, slowly(), timeout=1.0)[0] == "DEADLINE_EXCEEDED"
        require_calls_ended(service)
        with grpc.insecure_channel(service.address) as channel:
            exchange = channel.stream_stream(METHOD)
            stalled = exchange(slowly(), timeout=90.0, metadata=((CUSTOMER, "mallory"),))
            while not service.calls:
                assert not stalled.done()
                time.sleep(0.01)
            code, reason = refusal_of(service.address, [first])
            assert (code, "come back later" in reason) == ("UNAVAILABLE", True)
            assert send_raw(service.address, [first], name="alice")
            assert not stalled.done()
            # The customer's own end repeats the call until there is room.
            room = threading.Timer(0.5, stalled.cancel)
            room.start()
            connection = Connection(service.address, insecure=True, name="mallory", patience=60.0)
            assert connection.call(Outgoing("describe"), replies(None)).fields["classes"] == 2
            connection.close()
            room.join()
        ended.set()


def test_where_it_may_listen(tmp_path, service):
    vendor = make_vendor(tmp_path / "other")
    for address, options, match in (
        ("0.0.0.0:0", {"insecure": True}, "this machine alone"),
        ("vendor.example:1", {"insecure": True}, "this machine alone"),
        ("127.0.0.1:0", {}, "certificates"),
        ("127.0.0.1:0", {"insecure": True, "certificates": tmp_path}, "not both"),
        ("127.0.0.1:0", {"certificates": tmp_path}, "has no certificates"),
        ("127.0.0.1", {"insecure": True}, "no address"),
        ("localhost:70000", {"insecure": True}, "no address"),
    ):
        with pytest.raises(ValueError, match=match):
            vendor.serve(address, **options)
    with pytest.raises(OSError, match="cannot listen"):
        vendor.serve(service.address, insecure=True)
    with pytest.raises(ValueError, match="this machine alone"):
        Connection("vendor.example:1", insecure=True)


class TestCertificates:
    """One service over TLS, and customers with good and bad certificates."""

    @pytest.fixture(scope="class")
    def folders(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("certificates")
        make_certificates(folder / "own", ["alice", "bob"])
        make_certificates(folder / "own", ["late"], days=-1)
        make_certificates(folder / "foreign", ["alice"])
        return folder

    @pytest.fixture(scope="class")
    def secured(self, folders, tmp_path_factory):
        vendor = make_vendor(tmp_path_factory.mktemp("vendor"))
        with vendor.serve("localhost:0", folders / "own" / "vendor", allowed=frozenset({"alice", "late"})) as service:
            yield service

    def describe(self, service, credentials, monkeypatch=None, patience=1.0):
        if isinstance(credentials, Credentials):
            # Past the customer's own check, as a hostile customer goes.
            monkeypatch.setattr(Credentials, "load", lambda _: credentials)
        connection = Connection(
            service.address, Path("x") if monkeypatch else credentials, deadline=30.0, patience=patience
        )
        try:
            return connection.call(Outgoing("describe"), replies(None)).fields
        finally:
            connection.close()

    def require_served(self, service, folders):
        start = time.monotonic()
        assert self.describe(service, folders / "own" / "alice", patience=60.0)["classes"] == 2
        assert time.monotonic() - start < 2

    def test_a_name_comes_from_the_certificate(self, secured, folders):
        assert self.describe(secured, folders / "own" / "alice", patience=60.0)["classes"] == 2
        with pytest.raises(MessageRejected, match="'bob' is not a customer here") as refused:
            self.describe(secured, folders / "own" / "bob", patience=60.0)
        assert refused.value.code == "PERMISSION_DENIED"

    def test_unknown_and_expired_certificates(self, secured, folders, monkeypatch):
        def read(folder, authority="own"):
            parts = [(folders / folder / name).read_bytes() for name in ("certificate.pem", "key.pem")]
            return Credentials((folders / authority / "authority" / "ca.pem").read_bytes(), *parts)

        # The vendor's own certificate does not make a customer either.
        for credentials in (read("foreign/alice"), read("own/late"), read("own/vendor")):
            with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="did not answer within 1 s"):
                self.describe(secured, credentials, patch)
        with pytest.raises(ValueError, match="expired on"):
            self.describe(secured, folders / "own" / "late")
        # A vendor of another authority, such as one in the middle, is not believed.
        with monkeypatch.context() as patch, pytest.raises(ConnectionError, match="not one of your authority's"):
            self.describe(secured, read("foreign/alice", "foreign"), patch, patience=60.0)
        # Nobody speaks without TLS.
        with pytest.raises(grpc.RpcError):
            send_raw(secured.address, Outgoing("describe"), timeout=2.0)
        assert self.describe(secured, folders / "own" / "alice", patience=60.0)["classes"] == 2

    def test_a_vendor_of_another_host_is_not_believed(self, tmp_path):
        folder = tmp_path / "certificates"
        make_certificates(folder, ["alice"], ["vendor.example"])
        vendor = make_vendor(tmp_path / "vendor").serve("localhost:0", folder / "vendor")
        with vendor as service, pytest.raises(ConnectionError, match="not one of your authority's for this address"):
            self.describe(service, folder / "alice", patience=60.0)

    def test_a_revoked_certificate_is_turned_away(self, tmp_path, monkeypatch):
        """Also where its connection was open before: no restart is needed."""
        folder = tmp_path / "certificates"
        make_certificates(folder, ["alice", "bob"])
        earlier = Credentials.load(folder / "bob")
        renew_certificates(folder, ["bob"])
        assert Credentials.load(folder / "bob").key != earlier.key
        with make_vendor(tmp_path / "vendor").serve("localhost:0", folder / "vendor") as service:
            connection = Connection(service.address, folder / "bob", deadline=30.0, patience=60.0)
            assert connection.call(Outgoing("describe"), replies(None)).fields["classes"] == 2
            revoke_certificates(folder, ["bob"])
            connection.patience = 1.0
            with pytest.raises((MessageRejected, ConnectionError)):
                connection.call(Outgoing("describe"), replies(None))
            connection.close()
            with pytest.raises(ConnectionError):
                self.describe(service, folder / "bob")
            with monkeypatch.context() as patch, pytest.raises(ConnectionError):
                self.describe(service, earlier, patch)
            assert self.describe(service, folder / "alice", patience=60.0)["classes"] == 2

    def test_unread_downloads_hold_the_places_of_their_certificate_alone(self, secured, folders, monkeypatch):
        """128 calls whose answers nobody reads: another customer is answered beside them, and the places come back."""
        large = folders / "large"
        large.write_bytes(bytes(8 << 20))
        monkeypatch.setattr(secured.vendor, "bottom", PackedBottom(large, "{}", "0" * 64))
        monkeypatch.setattr(secured, "allowed", None)
        bob = Credentials.load(folders / "own" / "bob")
        credentials = grpc.ssl_channel_credentials(bob.authority, bob.key, bob.certificate)
        # A client that takes 64 KiB before it reads: by probes of the bandwidth it would take the whole answer.
        with grpc.secure_channel(secured.address, credentials, [("grpc.http2.bdp_probe", 0)]) as channel:
            exchange = channel.stream_stream(METHOD)
            unread = [exchange(iter(Outgoing("bottom")), timeout=300.0) for _ in range(128)]
            end = time.monotonic() + 60
            while secured.calls["bob"] < secured.vendor.limits.calls and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.5)
            assert secured.calls["bob"] == secured.vendor.limits.calls
            self.require_served(secured, folders)
            assert secured.calls["bob"] == secured.vendor.limits.calls
            for call in unread:
                call.cancel()
        require_calls_ended(secured)

    def test_silent_connections_do_not_keep_a_customer_out(self, tmp_path, folders):
        """1,200 connections, more than this process has descriptors for, all silent: a customer is served beside them."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = len(os.listdir("/proc/self/fd")) + 200
        assert few < 1200
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        try:
            with make_vendor(tmp_path).serve("localhost:0", folders / "own" / "vendor") as service:
                port = service.address.rpartition(":")[2]
                silent = subprocess.Popen(
                    [sys.executable, "-c", SILENT, port, "1200"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                with silent:
                    assert silent.stdout.readline() == b"all are open\n"
                    self.require_served(service, folders)
                    silent.stdin.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


SILENT = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection(("localhost", int(sys.argv[1]))) for _ in range(int(sys.argv[2]))]
print("all are open", flush=True)
sys.stdin.read()
"""
