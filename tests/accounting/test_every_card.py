"""The card of every method and of a federated run: `verify` holds, and whoever alters what matters is found."""

import copy
import dataclasses
import json
from html import escape

import pytest
import torch
import typer
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

import fastdp
import fastdp.accounting as accounting
from fastdp.accounting import Card, verify
from fastdp.accounting.card import digest
from fastdp.accounting.claim import read_claim
from fastdp.accounting.exports import FORMATS, SUFFIXES, export
from fastdp.accounting.page import mechanism_sentence
from fastdp.accounting.statements import SYNTHETIC
from fastdp.commands.privacy import verify_command
from fastdp.federated.config import FederatedConfig
from fastdp.federated.reports import central_card, run_card
from fastdp.methods import ewft
from fastdp.methods.rapft import NoisyMap, PublicGradients
from fastdp.methods.sap import CTI, PrivateBottom
from fastdp.methods.votes import PrivateVotes
from tests.engine.runs import Classifier, collate, examples, loader, logical_step
from tests.tokenizers_for_tests import quickstart

CENTRAL = {
    "DPSGD": fastdp.DPSGD(),
    "Rap-FT": fastdp.RapFT(NoisyMap(2.0, 0.5)),
    "Rap-FT, axes": fastdp.RapFT(PublicGradients([collate(examples(2, 9))]), allocation="axes"),
    "DP-FROST": fastdp.DPFrost(unfreezing_ratio=0.9, selection_noise_multiplier=2.0),
}


def central(name, folder):
    """A run of two steps: its card, its ledger and the weights that it leaves."""
    torch.manual_seed(0)
    model = Classifier()
    data = loader([{"x": torch.randn(5), "labels": i % 3} for i in range(40)], batch_size=8)
    private = fastdp.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        method=CENTRAL[name],
        noise_multiplier=1.0,
        target_delta=1e-3,
        epochs=1,
        output_dir=folder,
    )
    for _ in range(2):
        logical_step(private)
    card = private.card()
    private.detach()
    save_file(model.state_dict(), folder / "model.safetensors")
    return card, {"ledger": folder / "ledger.jsonl", "weights": folder}


def bert():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, **sizes)).train()


def coded():
    """EW-FT's codebook: each record told once, by randomised response."""
    model = bert()
    settings = {"layer": 1, "sequence_length": 6, "dataset_size": 8}
    private = ewft.PureEWFT(model, mechanism=ewft.codebook(2, 1.5), **settings)
    batch = {"input_ids": torch.randint(5, 50, (8, 6)), "attention_mask": torch.ones(8, 6, dtype=torch.int64)}
    private.learn([{**batch, "labels": torch.arange(8) % 2}])
    model(**batch, example_ids=torch.arange(8))
    card = private.card()
    private.remove()
    return card, {}


def local(folder):
    """EW-FT on a model that is not trained: every record released in two epochs."""
    model = bert()
    noise = ewft.dp_forward(2, 8.0, 1e-4)
    private = fastdp.EWFT(
        model, layer=1, noise=noise, sequence_length=6, dataset_size=8, autoencoder=None, output_dir=folder
    )
    for epoch in (1, 2):
        private.set_epoch(epoch)
        model(input_ids=torch.randint(5, 50, (8, 6)), example_ids=torch.arange(8))
    card = private.card()
    private.remove()
    return card, {"ledger": folder / "ledger.jsonl"}


def replaced_tokens():
    torch.manual_seed(0)
    privatizer = fastdp.TextPrivatizer(torch.randn(20, 3), eta=3.0)
    privatizer([1, 2, 3])
    return privatizer.statement(), {}


def counted_tokens():
    """With counts of private texts, whose event stands beside the bound."""
    torch.manual_seed(0)
    counted = CTI(torch.rand(2, 20), torch.ones(20, dtype=torch.bool), fastdp.accounting.gaussian(2.0))
    return fastdp.TextPrivatizer(torch.randn(20, 3), eta=3.0, cti=counted).statement(), {}


def told_cells():
    """SAP's quotient: a token's cell by randomised response."""
    cti = CTI.from_counts(torch.arange(1.0, 41.0).view(2, 20), source="public", form="quotient", cells=3)
    return fastdp.TextPrivatizer(torch.randn(20, 3), epsilon=3.0, cti=cti).statement(), {}


def hidden_rows():
    return PrivateBottom(torch.nn.Linear(2, 2).requires_grad_(False), eta=4.0).statement(releases=2), {}


def private_words(mechanism):
    tokenizer, table = quickstart()
    perturb = fastdp.SelectivePerturbation(2.0, mechanism)
    return perturb(["Alice Smith lives in Paris, at alice@example.org"], tokenizer, table).card(), {}


def federated(central=False):
    config = FederatedConfig(model="m", output="o", eval="e", rounds=2, fraction=0.5)
    config = dataclasses.replace(config, client_clip=1.0, client_noise_multiplier=1.0, dpsgd_epsilon=4.0)
    if not central:
        return run_card(config, [{"void": False, "perplexity": 9.5}], 40), {}
    model = accounting.dpsgd_model(1.0, config.fraction, "poisson", 2)
    header = {"dataset_size": 40, "unit": "client", "adjacency": "add_remove"}
    ledger = accounting.Ledger.create(None, header, event=model, budget_steps=2)
    ledger.record()
    return central_card(config, ledger, 40, [torch.zeros(3)]), {}


def voted():
    """Noised votes for candidates that a model behind an API wrote."""
    votes = PrivateVotes(
        [f"text {i}" for i in range(30)],
        lambda texts: torch.tensor([[float(len(text))] for text in texts]),
        rounds=2,
        target_epsilon=2.0,
        target_delta=1e-3,
    )
    votes.count({"": ["a", "b"]})
    return votes.card(), {}


def synthetic(folder):
    """A run of which texts were drawn, as `fastdp synthesize` writes its card."""
    card, others = central("DPSGD", folder)
    return card.with_facts(synthetic={"rows": 3, "sha256": 64 * "0", "statement": SYNTHETIC}), others


MAKE = {
    **{name: lambda folder, name=name: central(name, folder) for name in CENTRAL},
    "EW-FT": local,
    "EW-FT, codebook": lambda folder: coded(),
    "TextPrivatizer": lambda folder: replaced_tokens(),
    "TextPrivatizer, counted": lambda folder: counted_tokens(),
    "TextPrivatizer, quotient": lambda folder: told_cells(),
    "PrivateBottom": lambda folder: hidden_rows(),
    "SelectivePerturbation": lambda folder: private_words("local"),
    "SelectivePerturbation, typed": lambda folder: private_words("typed"),
    "federated run": lambda folder: federated(),
    "federated run, central": lambda folder: federated(central=True),
    "private votes": lambda folder: voted(),
    "synthetic texts": synthetic,
}


@pytest.fixture(scope="module", params=MAKE)
def made(request, tmp_path_factory):
    """A method's card with what it may be compared with."""
    return MAKE[request.param](tmp_path_factory.mktemp("run"))


def test_it_is_verified_in_every_form_and_no_figure_of_it_can_be_altered(made, tmp_path):
    card, others = made
    bound = read_claim(card).headline(card)[0]
    found = verify(card, **others).recomputed
    for form in FORMATS:
        text = export(card, form)
        path = tmp_path / f"card{SUFFIXES[form]}"
        path.write_text(text)
        result = verify(path, **others)
        assert result.guarantee, (form, result.reason)
        assert result.recomputed == found
        written = next(shown for shown in (bound, escape(bound), bound.replace("'", "''")) if shown in text)
        stated = text.replace(written, "epsilon <= 0.001 at delta = 1e-09")
        assert stated != text
        trusted = text.replace("Assum", "Not assum").replace("trust_assumptions: ", "trust_assumptions: no ")
        for altered in (stated, trusted):
            path.write_text(altered)
            assert altered == text or not verify(path).holds, form


#: What a card of each says chose parameters or their noise.
SENTENCES = {
    "Rap-FT": "A noised relevance map (noise multiplier 2, part of the event) sets how noise is divided",
    "Rap-FT, axes": "A public gradients relevance map sets how noise is divided",
    "DP-FROST": "chosen by 5 releases of gradient magnitudes (noise multiplier 2, part of the event)",
}


def test_it_holds_and_says_what_nobody_looked_at(made, request, tmp_path):
    card, others = made
    for form in (card, card.save(tmp_path / "card")[0]):
        result = verify(form, **others)
        assert result.holds, result.reason
        assert result.guarantee
        assert any("no signature" in entry for entry in result.unchecked)
    assert Card.load(tmp_path / "card.json").to_markdown() == (tmp_path / "card.md").read_text()
    # Replaced tokens and noised rows are no sums that are rounded to a grid, and their cards may not say so.
    assert ("secure_rounding" in card["noise_source"]) == ("event" in card)
    assert SENTENCES.get(request.node.callspec.params["made"], "") in mechanism_sentence(card)


def test_every_field_is_bound_by_the_digest(made):
    card, _ = made
    for field in card:
        assert not verify({**card, field: [card[field]]}), field
        assert not verify({key: value for key, value in card.items() if key != field}), field


FIGURES = [("epsilon", "upper_bound"), ("budget", "of_a_unit"), ("budget", "releases"), ("budget", "of_a_text")]


def test_a_bound_made_smaller_is_found_whoever_renews_the_digest(made):
    card, others = made
    claims = (card, *card["also"])
    places = [(n, *f) for n, claim in enumerate(claims) for f in FIGURES if claim.get(f[0], {}).get(f[1])]
    assert places or all(claim["kind"] == "elsewhere" for claim in claims)
    for number, group, key in places:
        forged = copy.deepcopy(dict(card))
        (forged if number == 0 else forged["also"][number - 1])[group][key] /= 2
        result = verify({**forged, "digest": digest(forged)}, **others)
        assert not result, (group, key)
        assert "altered" not in result.reason


#: Free text: sentences of which those that a mechanism or a field implies must stand, when and with what it was written.
FREE = {"assumptions", "created", "notes", "remaining", "software", "unprotected", "weights"}
#: Tables with entries of their makers' choice.
OPEN = {("settings", "detector"), ("settings", "strengths"), ("mechanism", "labels")}


def single_changes(value, path=()):
    """Each leaf and branch of a card, and another value of its kind; None where it is left out."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from single_changes(part, (*path, key))
    others = {bool: (not value,), int: (value, 3), float: (0.5, 1.5), str: ("other", ""), dict: ({},), list: ([],)}
    for other in others.get(type(value), (1.0,)):
        more = other is value and type(value) is int
        changed = value + 1 if more else value * other if isinstance(other, float) and value else other
        if path and changed != value:
            yield path, changed
    if path:
        yield path, None


def test_single_changes_that_nobody_finds_are_free_text_or_said_to_be_their_makers_statements(made):
    card, others = made
    begin = "what its maker states, and nothing here recomputes: "
    stated = next(entry.removeprefix(begin) for entry in verify(card, **others).unchecked if entry.startswith(begin))
    names = {name.strip("'") for name in stated.split(", ")}
    assert "and sentences that no field implies" in names
    of_mechanism = [each for each in verify(card, **others).unchecked if each.startswith("settings of the mechanism")]
    tried, passed = 0, []
    for path, value in single_changes(json.loads(card.to_json())):
        forged = json.loads(card.to_json())
        place = forged
        for key in path[:-1]:
            place = place[key]
        before = place[path[-1]]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        tried += 1
        if path != ("digest",) and verify({**forged, "digest": digest(forged)}, **others).holds:
            passed.append((path, before, value))
    assert tried > 60
    for path, before, value in passed:
        if path[0] in FREE or path[:2] in OPEN:
            continue
        # No field can be left out or take a value of another kind: only another number, name or setting of its maker's.
        assert value is not None or path == ("synthetic",), path
        if value is None:
            continue
        assert type(value) is type(before), (path, value)
        assert not isinstance(value, dict | list), (path, value)
        assert names & {path[0], path[-1]} or of_mechanism, path
        if "ledger" in others and path[0] == "mechanism":
            assert repr(path[1]) in of_mechanism[0]


#: What other fields of a card contradict: a path, another value, and words of the refusal, without a ledger.
CONTRADICTED = {
    "DPSGD": [
        ("model trained_parameters", 67, "trained parameters, but its weights have another number"),
        ("weights", ["0" * 64], "1 of the 1 tensors"),
        ("remaining", [], "remaining lacks"),
        ("unit", "person", "which DP-SGD does not protect"),
        ("created", "yesterday", "created is no date"),
        ("sample_rate", 0.0, "0.0 as its sample rate"),
        ("noise_multiplier", 0.0, "0.0 as noise multiplier"),
        ("steps spent", 1, "states 1 steps, but its event holds 2"),
        ("software", {}, "names no versions"),
    ],
    "Rap-FT": [
        ("mechanism mask noise_multiplier", 4.0, "a selection at noise multiplier 4"),
        ("mechanism mask sample_rate", 0.25, "a selection at noise multiplier 2"),
        ("mechanism mask kind", "public", "relevance map is not described"),
        ("mechanism allocation", "axes", "axes_power is not that of its allocation"),
        ("mechanism irrelevance_ratio", None, "irrelevance_ratio is missing, or of the wrong type"),
    ],
    "DP-FROST": [
        ("mechanism selection_noise_multiplier", 1.0, "a selection at noise multiplier 1"),
        ("mechanism selection_steps", 3, "a selection at noise multiplier 2"),
        ("mechanism choose_by", "values", "choose_by is missing, or of the wrong type"),
    ],
    "EW-FT": [
        ("sampling", "poisson", "sampling lacks"),
        ("unprotected", [], "unprotected lacks"),
        ("notes", [], "notes lacks"),
    ],
    "EW-FT, codebook": [
        ("mechanism kept", 0.9, "share of codes"),
        ("mechanism cells", 3, "share of codes"),
        ("released_records", 9, "more released records"),
        ("unprotected", [], "unprotected lacks what codebook states"),
        ("mechanism name", "own", "states what DP-Forward leaves unprotected"),
    ],
    "TextPrivatizer": [
        ("eta", None, "but eta None"),
        ("policy unknown", "keep", "policy.unknown is missing, or of the wrong type"),
        ("assumptions", [], "assumptions lacks"),
        ("nats_per_distance", 2.0, "nats_per_distance is not its bound"),
        ("displacement unchanged", 1.5, "a share of tokens above 1"),
    ],
    "TextPrivatizer, counted": [
        ("also", [], "claims are not those of its counts"),
        ("also 0 unit", "word", "the unit of counts"),
        ("mechanism cti tilt", None, "settings of another form"),
    ],
    "TextPrivatizer, quotient": [("mechanism cti form", "prior", "is not that of the mechanism quotient")],
    "PrivateBottom": [("mechanism bottom_trained", True, "a trained bottom"), ("unprotected", [], "unprotected lacks")],
    "SelectivePerturbation": [
        ("settings budget", "text", "not that of a budget of each text"),
        ("tokens private", 16, "counts of texts and private tokens"),
        ("mean_of_a_text", 1.0, "counts of texts and private tokens"),
        ("settings name", "another", "settings are not those of its mechanism"),
        ("unprotected", [], "unprotected lacks"),
    ],
    "SelectivePerturbation, typed": [
        ("settings replacement", "none", "how tokens of one type"),
        ("notes", [], "notes lacks"),
    ],
    "federated run": [
        ("settings dpsgd_epsilon", 2.0, "is not that of its settings"),
        ("settings budget", "text", "is not that of its settings"),
        ("settings client_noise_multiplier", 3.0, "is not that of its settings"),
        ("updates", {"accepted": 3}, "how many updates came"),
        ("notes", [], "how many updates came"),
        ("settings perturbation", "none", "claims are not those of its settings"),
        ("also", [], "claims are not those of its settings"),
        ("trusted", [], "sentences are not those of its settings"),
        ("rounds", 2, "counts of rounds"),
    ],
    "private votes": [("assumptions", [], "assumptions lacks"), ("sampling", "poisson", "sampling lacks")],
    "synthetic texts": [("synthetic rows", -1, "synthetic texts are not described")],
}


def test_what_other_fields_contradict_is_found(made, request):
    card, others = made
    for path, value, said in CONTRADICTED.get(request.node.callspec.params["made"], ()):
        forged = json.loads(card.to_json())
        place, keys = forged, [int(key) if key.isdigit() else key for key in path.split()]
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        result = verify({**forged, "digest": digest(forged)}, weights=others.get("weights"))
        assert not result.holds, path
        assert said in result.reason, (path, result.reason)


@pytest.mark.parametrize("path", [("eta",), ("displacement", "eta"), ("epsilon_of_a_token",), ("mechanism", "epsilon")])
def test_a_setting_that_the_bound_contradicts_is_found(made, path):
    card, _ = made
    forged = json.loads(card.to_json())
    place = forged.get(path[0], {}) if len(path) > 1 else forged
    if not isinstance(place, dict) or not isinstance(place.get(path[-1]), float) or "budget" not in forged:
        return
    place[path[-1]] *= 0.5
    result = verify({**forged, "digest": digest(forged)})
    assert not result
    assert result.reason.startswith("the card states ")


def test_the_command_says_what_was_and_was_not_checked(made, tmp_path, capsys):
    card, others = made
    path = card.save(tmp_path / "card")[0]
    verify_command(path, **others)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("holds: ")
    assert "not checked: - who wrote the card: its digest finds accidents and is no signature" in said
    assert ("against the run's ledger" in said) == ("run_id" in card and card["run_id"] is not None and not others)
    if not card["weights"]:
        # What a client of a federation, or a split customer, keeps beside its card.
        save_file({"ids": torch.zeros(3)}, tmp_path / "perturbed.safetensors")
        for name in ("statement.json", "run_card.json", "card.json"):
            path = path.rename(tmp_path / name)
            verify_command(tmp_path)
    path.write_text(json.dumps({**card, "guarantee": "more"}))
    with pytest.raises(typer.Exit):
        verify_command(path)
    assert "does not hold: the card was altered" in " ".join(capsys.readouterr().err.split())
