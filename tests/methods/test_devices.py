"""Local methods whose table is on another device: draws are made there, and are those of the processor."""

import pytest
import torch

import fastdp
from fastdp.methods.sap import CTI, TextPrivatizer, add_dchi_noise
from fastdp.methods.selective.mechanism import FORMS, TokenMechanism, public_radius
from fastdp.ops import NoiseStream
from tests.cases import cases
from tests.elsewhere import DEVICE, There, elsewhere
from tests.tokenizers_for_tests import quickstart

IDS = torch.arange(240).remainder(60).view(6, 40)


def table():
    return torch.randn(60, 8, generator=torch.Generator().manual_seed(5))


def contributing(form):
    importance = torch.rand(2, 60, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return CTI(importance, torch.ones(60, dtype=torch.bool), form=form, source="public")


@cases(
    ("mechanism", "form"),
    [*(("laplace", form) for form in (None, "paper")), *(("exponential", form) for form in (None, "prior"))],
)
def test_a_privatizer_draws_where_its_table_is(mechanism, form):
    settings = {"eta": 4.0, "mechanism": mechanism, "cti": form and contributing(form), "special_ids": (0, 1)}
    here = TextPrivatizer(table(), **settings, unsafe_seed=3)
    with elsewhere() as ran:
        there = TextPrivatizer(table().to(DEVICE), **settings, unsafe_seed=3)
        labels = [0, 1, 0, 1, 1, 0] if form else None
        assert torch.equal(there(IDS, labels=labels), here(IDS, labels=labels))
        op = "private_snap" if mechanism == "laplace" else "exponential_choice"
        assert ran[op] == (2 if form else 1)
        assert there.digest() == here.digest()
        assert there.statement()["eta"] == 4.0
        if mechanism == "exponential":
            assert there.nats_per_distance() == pytest.approx(here.nats_per_distance())
            torch.testing.assert_close(there.log_probabilities(7), here.log_probabilities(7))


@pytest.mark.parametrize("cti", [None, "quotient"])
def test_a_privatizer_keeps_ids_on_the_device_of_its_table(cti, monkeypatch):
    settings = {"eta": 4.0, "mechanism": "exponential"}
    if cti is not None:
        ids, labels = torch.arange(60).repeat(2, 1), [0, 1]
        ids[1] = ids[1].flip(0).clamp(max=40)
        cells = CTI.from_texts(ids, labels, classes=2, vocabulary=60, public=True, form=cti, cells=3, min_support=1)
        settings = {"epsilon": 2.0, "cti": cells}
    mask = (IDS % 7 > 0).long()
    here = TextPrivatizer(table(), **settings, special_ids=(0, 1), unsafe_seed=3)
    with elsewhere():
        there = TextPrivatizer(table().to(DEVICE), **settings, special_ids=(0, 1), unsafe_seed=3)
        given = [tensor.to(DEVICE) for tensor in (IDS, mask)]
        expected = here(IDS, attention_mask=mask, special_tokens_mask=mask)
        if cti is None:
            # One element read on the host is a wait; a row of ids copied there is what this test forbids.
            monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("ids left the device"))
        found = there(given[0], attention_mask=given[1], special_tokens_mask=given[1])
        monkeypatch.undo()
        assert isinstance(found, There)
        assert torch.equal(found.cpu(), expected)
        assert there(IDS[0].tolist()) == here(IDS[0].tolist())
        assert (there.tokens_released, there.tokens_kept) == (here.tokens_released, here.tokens_kept)


@cases("form", FORMS)
def test_a_mechanism_draws_where_its_table_is(form):
    def made(rows):
        return TokenMechanism(form, rows, 3.0, candidates=torch.arange(60) > 2)

    here, ids = made(table()), IDS.flatten()
    expected = here.draw(ids, 2.0, NoiseStream.unsafe_reproducible(1))
    with elsewhere() as ran:
        there = made(table().to(DEVICE))
        assert torch.equal(there.draw(ids, 2.0, NoiseStream.unsafe_reproducible(1)), expected)
        assert ran["exponential_choice"] == (form == "local")
        assert there.strength(1.0) == here.strength(1.0)
        torch.testing.assert_close(there.log_probabilities(7, 2.0), here.log_probabilities(7, 2.0))
        assert public_radius(there.table) == public_radius(here.table)


def test_a_cache_made_on_one_device_is_read_on_another(tmp_path):
    tokenizer, rows = quickstart()
    rows = rows.get_input_embeddings().weight if isinstance(rows, torch.nn.Module) else rows
    perturb, texts = fastdp.SelectivePerturbation(1.0), ["Please call Richard McCray on 0393 1144137."]
    drawn = perturb(texts, tokenizer, rows, cache=tmp_path / "cache")
    with elsewhere() as ran:
        read = perturb(texts, tokenizer, rows.detach().to(DEVICE), cache=tmp_path / "cache")
        assert read.from_cache
        assert not ran
        perturb(texts, tokenizer, rows.detach().to(DEVICE))
        assert ran["exponential_choice"] == 1
    assert read.ids == drawn.ids


def test_rows_get_their_noise_where_they_are():
    rows = torch.randn(3, 5, 7)
    expected = add_dchi_noise(rows, 2.0, NoiseStream.unsafe_reproducible(1))
    with elsewhere() as ran:
        noisy = add_dchi_noise(rows.to(DEVICE), 2.0, NoiseStream.unsafe_reproducible(1))
        assert isinstance(noisy, There)
        assert ran == {"dchi_vectors": 1}
        assert torch.equal(noisy.cpu(), expected)
