"""A vendor that serves on this machine, and customers of it. gRPC and cryptography are an extra."""

import pytest

pytest.importorskip("grpc", reason="grpcio is in the optional extra 'split'")
pytest.importorskip("cryptography", reason="cryptography is in the optional extra 'split'")

from fastdp.split import SplitCustomer
from tests.split.world import make_texts, make_tokenizer, make_vendor


@pytest.fixture
def service(tmp_path):
    with make_vendor(tmp_path / "vendor").serve("127.0.0.1:0", insecure=True) as running:
        yield running


@pytest.fixture
def customer_of(tmp_path):
    """Makes customers that are closed at the end; the name is the folder's too."""
    made = []

    def make(service, name="alice", **options):
        settings = {
            "insecure": True,
            "name": name,
            "tokenizer": make_tokenizer(),
            "batch_size": 8,
            "patience": 60.0,
            "deadline": 60.0,
            **options,
        }
        made.append(SplitCustomer(service.address, tmp_path / name, **settings))
        return made[-1]

    yield make
    for customer in made:
        customer.close()


@pytest.fixture(scope="session")
def corpus():
    return make_texts(24)
