"""Who is let in, for how long, and what strangers and silent peers can hold."""

import asyncio
import contextlib
import dataclasses
import re
import socket
import ssl
import threading
import time

import pytest

from fastdp.tls import client_context, make_certificates, revoke_certificates
from fastdp.tls_proxy import ProxyLimits, TlsListener, TlsProxy

# A handshake may take its time on a busy machine.
LIMITS = ProxyLimits(handshake_seconds=60.0, handshakes=8, connections=2, stall_seconds=0.5, check_seconds=0.1)


@pytest.fixture
def certificates(tmp_path):
    make_certificates(tmp_path / "own", ["alice", "bob"])
    return tmp_path / "own"


@contextlib.contextmanager
def listening(certificates, handler, limits=LIMITS):
    with TlsListener(("127.0.0.1", 0), certificates / "vendor", handler, "http/1.1", limits) as listener:
        yield listener


def connect(listener, certificates, name="alice"):
    plain = socket.create_connection(("127.0.0.1", listener.port), timeout=60)
    context = client_context(certificates / name)
    # What Python asks of a chain by itself from 3.13 on.
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


async def echo(certificate, reader, writer):
    while data := await reader.read(100):
        writer.write(data)
        await writer.drain()


def ended(connection):
    """Whether the other end closes within its socket's time limit, rather than go on waiting."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_holders_of_a_certificate_are_served_and_others_logged(certificates, tmp_path, caplog):
    make_certificates(tmp_path / "foreign", ["alice"])
    with listening(certificates, echo) as listener:
        with connect(listener, certificates) as alice:
            alice.sendall(b"hello")
            assert alice.recv(100) == b"hello"
            assert alice.version() == "TLSv1.3"
        foreign = ssl.create_default_context(cafile=certificates / "vendor" / "ca.pem")
        for folder in (None, tmp_path / "foreign" / "alice", certificates / "vendor"):
            if folder:
                foreign.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
            with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as plain:
                # TLS 1.3 tells a client that it is turned down by the first answer.
                with contextlib.suppress(OSError):
                    plain = foreign.wrap_socket(plain, server_hostname="127.0.0.1")
                    plain.sendall(b"hello")
                assert ended(plain)
    assert "a connection of 127.0.0.1 was refused: " in caplog.text
    assert len(caplog.records) < 3, "at most one a second"


def test_a_peer_that_leaves_at_once_is_logged_with_a_reason(certificates, caplog):
    with listening(certificates, echo) as listener:
        socket.create_connection(("127.0.0.1", listener.port), 60).close()
        while not caplog.records:
            time.sleep(0.01)
    assert re.search("a connection of 127.0.0.1 was refused: .", caplog.text)


def test_silent_peers_hold_no_place(certificates):
    """Every place for a handshake is taken, again and again: a customer is served all the same, and the silent are let go."""
    for seconds in (600.0, 0.5):
        limits = dataclasses.replace(LIMITS, handshake_seconds=seconds)
        with listening(certificates, echo, limits) as listener, contextlib.ExitStack() as silent:
            held = [silent.enter_context(socket.create_connection(("127.0.0.1", listener.port), 60)) for _ in range(40)]
            if seconds > 60:
                with connect(listener, certificates) as alice:
                    alice.sendall(b"hello")
                    assert alice.recv(100) == b"hello"
            else:
                assert all(ended(each) for each in held)


def test_a_certificate_has_so_many_connections(certificates):
    """The newest count, and another's are not touched."""
    with listening(certificates, echo) as listener, connect(listener, certificates, "bob") as bob:
        bob.sendall(b"b")
        assert bob.recv(100) == b"b"
        first, *later = [connect(listener, certificates) for _ in range(3)]
        for each in later:
            each.sendall(b"a")
            assert each.recv(100) == b"a"
        assert ended(first)
        bob.sendall(b"b")
        assert bob.recv(100) == b"b"


def test_open_connections_end_with_their_certificate(certificates):
    with listening(certificates, echo) as listener, connect(listener, certificates) as alice:
        alice.sendall(b"a")
        assert alice.recv(100) == b"a"
        revoke_certificates(certificates, ["alice"])
        assert ended(alice)
        with connect(listener, certificates, "bob") as bob:
            bob.sendall(b"b")
            assert bob.recv(100) == b"b"


def test_a_proxy_tells_who_calls_and_ends_what_nobody_reads(certificates, tmp_path):
    """The program behind it sees a path, by which the name is found while the connection is open; unread bytes end it."""
    named, released = [], threading.Event()
    with socket.socket(socket.AF_UNIX) as backend, contextlib.ExitStack() as stack:
        backend.bind(str(tmp_path / "calls"))
        backend.listen()
        proxy = stack.enter_context(
            TlsProxy(("127.0.0.1", 0), certificates / "vendor", tmp_path / "calls", "h2", LIMITS)
        )

        def serve():
            connection, path = backend.accept()
            with connection:
                named.append((path, proxy.name(path)))
                with contextlib.suppress(OSError):
                    while True:
                        connection.sendall(bytes(1 << 16))
            released.set()

        thread = threading.Thread(target=serve)
        thread.start()
        with connect(proxy, certificates):
            assert released.wait(60)
        thread.join()
        ((path, name),) = named
        assert name == "alice"
        for unknown in (path, "", "unix:elsewhere"):
            with pytest.raises(ValueError, match="no certificate"):
                proxy.name(unknown)


def test_what_cannot_be_listened_at(certificates, tmp_path):
    with listening(certificates, echo) as listener:
        with pytest.raises(OSError, match="in use"):
            TlsListener(("127.0.0.1", listener.port), certificates / "vendor", echo, "h2")
        with pytest.raises(ValueError, match="has no certificates"):
            TlsListener(("127.0.0.1", 0), tmp_path, echo, "h2")


def test_an_error_of_a_handler_ends_one_connection(certificates):
    async def fail(certificate, reader, writer):
        await reader.read(1)
        raise asyncio.IncompleteReadError(b"", 1)

    with listening(certificates, fail) as listener:
        for _ in range(2):
            with connect(listener, certificates) as alice:
                alice.sendall(b"a")
                assert ended(alice)
