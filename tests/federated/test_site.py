"""A client by itself: its partition, its perturbed texts, its cards, its training, DP-SGD and what it refuses."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastdp.accounting import Card
from fastdp.federated import FederatedConfig
from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.policy import ClientRefusal
from fastdp.federated.site import Site, make_detector
from tests.elsewhere import elsewhere


def adapted(settings, **changes):
    return AdaptedModel.load(FederatedConfig.read(settings | changes))


@pytest.mark.parametrize("changes", [{}, {"peft": "lora", "lora_r": 2}], ids=["bottleneck", "lora"])
def test_training_changes_the_adapter_alone(settings, changes):
    model = adapted(settings, **changes)
    before, base = model.adapter, model.base
    fitted = Site.of_partition(model, 0, 2).fit(1)
    assert fitted.examples == 12
    assert fitted.loss > 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.adapter.items())
    assert all(changes.get("peft", "bottleneck") in name for name in before)
    model.adapter = before
    assert adapted(settings, **changes).base == base


@pytest.mark.parametrize("clients", [1, 5, 24])
def test_every_text_goes_to_one_client(settings, clients):
    model = adapted(settings)
    dealt = [Site.of_partition(model, index, clients).examples.items for index in range(clients)]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    shared = sorted(item["input_ids"] for own in dealt for item in own)
    assert shared == sorted(item["input_ids"] for item in Site(model, "all", model.texts(settings["train"])).examples)
    assert dealt[0] == Site.of_partition(adapted(settings), 0, clients).examples.items


def test_perturbed_where_the_model_is(settings):
    with elsewhere() as ran:
        site = Site.of_partition(adapted(settings, perturbation="selective", epsilon=0.5, device="meta"), 0, 2)
        assert ran["exponential_choice"] == 1
    assert Card.load(site.folder / "card.json")["guarantee"].startswith("epsilon-local")


def test_perturbed_once_for_all_rounds(settings):
    model = adapted(settings, perturbation="selective", epsilon=0.5)
    first = Site.of_partition(model, 0, 2)
    again = Site.of_partition(model, 0, 2)
    plain = Site.of_partition(adapted(settings), 0, 2)
    assert first.examples.items == again.examples.items
    assert first.examples.items != plain.examples.items
    lengths = [[len(item["input_ids"]) for item in site.examples.items] for site in (first, plain)]
    assert lengths[0] == lengths[1]
    card = Card.load(first.folder / "card.json")
    assert card["guarantee"].startswith("epsilon-local")
    assert card["budget"]["releases"] == 1


def test_replaced_tokens_are_read_and_not_learned(settings):
    """The labels that are left out are those of the replaced tokens, by what the client keeps of them; the paper learns all."""
    options = {"perturbation": "selective", "mechanism": "typed", "replacement": "model", "epsilon": 2.0}
    model = adapted(settings, **options)
    site = Site.of_partition(model, 0, 2)
    kept = load_file(site.folder / "perturbed.safetensors")
    first = int(model.tokenizer.bos_token_id is not None)
    hidden = 0
    for item, private in zip(site.examples.items, kept["private"].split(kept["lengths"].tolist()), strict=True):
        left_out = [label == -100 for label in item["labels"]][first : first + len(private)]
        assert left_out == private.tolist()
        learned = [label for label in item["labels"] if label != -100]
        assert learned == [token for token, label in zip(item["input_ids"], item["labels"]) if label != -100]
        hidden += sum(left_out)
    assert hidden > 0
    everything = Site.of_partition(adapted(settings, **options, learn_replaced=True), 0, 2)
    assert [item["input_ids"] for item in everything.examples.items] == [i["input_ids"] for i in site.examples.items]
    assert all(item["labels"] == item["input_ids"] for item in everything.examples.items)


def test_a_text_of_replaced_tokens_alone_is_learned(settings):
    model = adapted(settings)
    model.tokenizer.eos_token = None
    (item,) = model.examples([[5, 6, 7]], [[True, True, True]]).items
    assert item["labels"] == item["input_ids"]
    (item,) = model.examples([[5, 6, 7]], [[True, True, False]]).items
    assert [label for label in item["labels"] if label != -100][-1] == 7


def test_another_epsilon_does_not_reuse_the_draws(settings):
    Site.of_partition(adapted(settings, perturbation="selective", epsilon=0.5), 0, 2)
    with pytest.raises(ValueError, match="another epsilon"):
        Site.of_partition(adapted(settings, perturbation="selective", epsilon=5.0), 0, 2)


def test_miss_rate_on_the_card(settings, tmp_path):
    labelled = tmp_path / "labelled.json"
    spans = [{"entity_type": "PERSON", "start_position": 0, "end_position": 4}]
    labelled.write_text(json.dumps([{"full_text": "Anna is here", "spans": spans}]))
    model = adapted(settings, perturbation="selective", labelled_spans=str(labelled))
    site = Site.of_partition(model, 0, 2)
    assert Card.load(site.folder / "card.json")["detector_quality"]["span_miss_rate"] == 0.0


def test_the_miss_rate_is_not_measured_on_the_private_texts(settings, tmp_path):
    first = json.loads(Path(settings["train"]).read_text().splitlines()[0])["text"]
    labelled = tmp_path / "labelled.json"
    labelled.write_text(json.dumps([{"full_text": first, "spans": []}]))
    model = adapted(settings, perturbation="selective", labelled_spans=str(labelled))
    with pytest.raises(ValueError, match="1 of 1 records are private ones"):
        Site.of_partition(model, 0, 1)


def test_an_organisations_own_names(settings, tmp_path):
    (tmp_path / "names.txt").write_text("Quorra\n\n Zed \n")
    config = FederatedConfig.read(settings | {"names": str(tmp_path / "names.txt")})
    (spans,) = make_detector(config).detect(["ask quorra"])
    assert [(span.start, span.end) for span in spans] == [(4, 10)]
    with pytest.raises(ValueError, match="names are for the rule detector"):
        make_detector(dataclasses.replace(config, detector="presidio"))


def test_a_client_without_data_says_so(settings):
    with pytest.raises(ClientRefusal, match="client-30 holds no example"):
        Site.of_partition(adapted(settings), 30, 31)


def test_a_large_batch_is_trained_in_parts_of_a_bounded_size(settings):
    """The same step, whatever is in memory at once: a loss is the mean over a batch's tokens."""
    found, rows = [], []
    for size in (64, 5):
        site = Site.of_partition(adapted(settings, batch_size=64, physical_batch_size=size), 0, 2)
        sizes = []
        site.adapted.model.register_forward_pre_hook(
            lambda _, __, given, into=sizes: into.append(len(given["input_ids"])), with_kwargs=True
        )
        fitted = site.fit(1)
        found.append((fitted.loss, site.adapted.adapter))
        rows.append(max(sizes))
    assert rows[1] == 5 < rows[0]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, rtol=0, atol=1e-4)


def fit_privately(settings, rounds):
    """Cards after each round of DP-SGD at a client, which reports neither loss nor time: no epsilon would cover them."""
    site = Site.of_partition(adapted(settings, dpsgd_epsilon=8.0, batch_size=6, rounds=rounds), 0, 2)
    cards = []
    for number in range(rounds):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = site.fit(number + 1)
        assert fitted.loss is fitted.seconds is None
        cards.append(Card.load(site.folder / "card_dpsgd.json"))
    return cards


def test_dpsgd_at_the_client(settings):
    (card,) = fit_privately(settings, 1)
    assert card["steps"] == {"planned": 2, "spent": 2}
    assert card["epsilon"]["upper_bound"] <= 8.0
    assert card["guarantee"] == "differential privacy"


@pytest.mark.slow
def test_dpsgd_at_the_client_counts_all_rounds(settings):
    """Two rounds of one pass: the ledger continues, and the card never passes the target."""
    first, second = fit_privately(settings, 2)
    assert [card["steps"]["spent"] for card in (first, second)] == [2, 4]
    assert first["epsilon"]["upper_bound"] < second["epsilon"]["upper_bound"] <= 8.0
