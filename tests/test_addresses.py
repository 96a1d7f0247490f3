"""The last port of an address, and the first that is none."""

import pytest

from fastdp.validate import host_and_port


def test_ports_end_at_65535():
    assert host_and_port("[::1]:65535") == ("::1", 65535)
    for address in ("localhost:65536", "localhost:100000", "localhost:-1", "localhost:", ":80"):
        with pytest.raises(ValueError, match="is no address"):
            host_and_port(address)
