"""The benchmark of the network program runs, and its customers lose nothing."""

import json

import pytest

pytest.importorskip("grpc", reason="grpcio is in the optional extra 'split'")

from bench import split


@pytest.mark.slow
def test_it_measures_steps_and_customers_at_once(tmp_path):
    split.main(["--size", "tiny", "--steps", "2", "--customers", "3", "--json", str(tmp_path / "split.json")])
    figures = json.loads((tmp_path / "split.json").read_text())["figures"]
    assert figures["step"]["over_tls_seconds"] > 0
    assert figures["step"]["in_process_seconds"] > 0
    assert figures["load"]["examples_arrived"] == figures["load"]["examples_sent"] == 16
