"""EW-FT on stock models: where it perturbs, by how much, what it counts, and what it refuses.

The statistical test fails by chance in fewer than one run in 10^8.
"""

import dataclasses
import inspect
import math

import peft
import pytest
import torch
import transformers

import fastdp
from fastdp import accounting, ops
from fastdp.methods import ewft
from tests.cases import cases, pairs
from tests.engine.models import batch, build, task_type

FAMILIES = ["bert", "roberta", "gpt2", "llama"]
DELTA = 1e-5
NONE = ewft.NoiseSchedule("no noise", (0.0, 0.0), DELTA)
TOKENS, ROWS = 11, 4


def attach(model, noise=NONE, **options):
    settings = {"layer": 1, "sequence_length": TOKENS, "dataset_size": ROWS, "autoencoder": None, "unsafe_seed": 0}
    return fastdp.EWFT(model, noise=noise, **{**settings, **options})


def full_batch(name, rows=ROWS):
    inputs = batch(name, rows=rows, tokens=TOKENS)
    inputs["input_ids"] = inputs["input_ids"].clamp(min=3)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs.pop("labels")
    return inputs


def numbered(name="bert"):
    """A batch of all records, for training."""
    return batch(name, rows=ROWS, tokens=TOKENS) | {"example_ids": torch.arange(ROWS)}


def seen_after(private, layer, run):
    """The hidden state that leaves a layer, as what follows receives it."""
    caught = []
    hook = private.blocks.place(layer)[1].register_forward_hook(lambda m, a, output: caught.append(output))
    run()
    hook.remove()
    return caught[-1][0] if isinstance(caught[-1], tuple) else caught[-1]


@cases(*pairs(("layer", ["embeddings", 1, 2, "output"]), ("name", FAMILIES)))
@torch.no_grad()
def test_without_clip_or_noise_the_model_computes_what_it_did(name, layer):
    model, inputs = build(name).eval(), full_batch(name)
    keys, plain = list(model.state_dict()), model(**inputs).logits
    private = attach(model, layer=layer, max_norm=1e6)
    assert torch.allclose(model(**inputs).logits, plain, atol=1e-5)
    assert list(model.state_dict()) == keys
    private.remove()
    assert torch.equal(model(**inputs).logits, plain)


@cases(*pairs(("layer", ["embeddings", 2, "output"]), ("name", FAMILIES)))
@torch.no_grad()
def test_each_example_is_clipped_as_a_whole(name, layer):
    model = build(name).eval()
    private = attach(model, layer=layer, max_norm=0.25)
    hidden = seen_after(private, layer, lambda: model(**full_batch(name)))
    assert hidden.flatten(1).norm(dim=1).tolist() == pytest.approx([0.25] * ROWS, rel=1e-5)


@pytest.mark.parametrize("autoencoder", [None, (5,)])
def test_codes_are_what_a_receiver_gets_of_queries(autoencoder):
    model = build("bert")
    private = attach(model, max_norm=0.25, autoencoder=autoencoder)
    inputs = full_batch("bert")
    if autoencoder:
        for private.autoencoder.trained_on in ("private", "", True, None):
            with pytest.raises(RuntimeError, match="has not been trained"):
                private.read_layer(inputs, "code")
        private.train_autoencoder([inputs])
    (hidden,), codes = private.hidden_states([inputs]), private.read_layer(inputs, "code")
    expected = hidden if autoencoder is None else private.autoencoder.encode(hidden)
    norms = expected.flatten(1).norm(dim=1)
    assert torch.allclose(codes, expected * (0.25 / norms).clamp(max=1)[:, None, None], atol=1e-5)
    assert private.inference_releases == ROWS
    assert model.training


@torch.no_grad()
def test_noise_is_that_of_sensitivity_2_c():
    """Clipped to C with noise for sensitivity 1, or C, the guarantee would fail: std = 2 C sigma."""
    model, bound, rows = build("bert").eval(), 0.3, 40
    private = attach(model, ewft.release_once(8.0, DELTA), max_norm=bound, dataset_size=rows)
    inputs = full_batch("bert", rows)
    noisy = seen_after(private, 1, lambda: model(**inputs))
    (clean,) = private.hidden_states([inputs])
    clipped = clean * (bound / clean.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]
    residual = (noisy - clipped).double()
    n, std = residual.numel(), 2 * bound * 0.60023
    # The variance of n normals has relative standard deviation sqrt(2 / n); 6 of them are passed once in 10^9.
    assert abs(residual.var() / std**2 - 1) < 6 * math.sqrt(2 / n) + 1e-3
    assert abs(residual.mean()) < 6 * std / math.sqrt(n)
    assert private.inference_releases == rows


@cases("name", FAMILIES)
@torch.no_grad()
def test_positions_that_skip_padding_are_refused_where_later_layers_get_them(name):
    model, inputs = build(name).eval(), full_batch(name)
    inputs["attention_mask"][0, :3] = 0
    whole = torch.arange(TOKENS)[None].expand(ROWS, -1)
    skipping = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    private = attach(model)
    model(**inputs, position_ids=whole)
    if private.blocks.causal:
        with pytest.raises(ValueError, match="leave position_ids out of the batch"):
            model(**inputs, position_ids=skipping)
    else:
        model(**inputs, position_ids=skipping)
    private.remove()
    for options in ({"lengths": "public"}, {"layer": "output"}):
        private = attach(model, **options)
        model(**inputs, position_ids=skipping)
        private.remove()


@torch.no_grad()
def test_padding_carries_nothing():
    model = build("bert").eval()
    private = attach(model, max_norm=1e6)
    inputs = batch("bert", rows=ROWS, tokens=TOKENS)
    inputs.pop("labels")
    hidden = seen_after(private, 1, lambda: model(**inputs))
    assert (hidden[inputs["attention_mask"] == 0] == 0).all()
    assert (hidden[inputs["attention_mask"] == 1].abs().sum(-1) > 0).all()


def trained(model, epochs=2, noise=None, **options):
    """An EWFT with a trained autoencoder, in training mode."""
    private = attach(model, noise or ewft.dp_forward(epochs, 8.0, DELTA), autoencoder=(6, 3), **options)
    private.train_autoencoder([full_batch("bert")] * 3)
    model.train()
    return private


@pytest.mark.parametrize("bottom", ["frozen", "trained"])
def test_a_frozen_bottom_gets_no_gradient_and_a_trained_one_voids_the_guarantee(bottom):
    model, frozen = build("bert"), bottom == "frozen"
    private = trained(model, bottom=bottom)
    private.set_epoch(1)
    model(**numbered()).loss.backward()
    for name, parameter in model.named_parameters():
        below = name in private.frozen_parameters
        assert below == (frozen and ("embeddings" in name or "layer.0" in name))
        assert (parameter.grad is None) == below, name
    assert all(p.grad is not None for p in private.trained_parameters())
    assert all((p.grad is None) == frozen for p in private.autoencoder.encoder.parameters())
    assert ["without noise" in flaw for flaw in private.flaws()] == ([] if frozen else [True, True])
    # Noise that can be drawn again protects nothing.
    assert private.epsilon() == private.inference_epsilon() == math.inf


def test_the_gradient_is_that_of_encode_clip_decode():
    model = build("bert").eval()
    private = attach(model, layer=2, max_norm=0.5, autoencoder=(5,), bottom="trained")
    inputs = full_batch("bert")
    private.set_epoch(1)
    model(**inputs, example_ids=torch.arange(ROWS)).logits.square().sum().backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    private.remove()
    model.zero_grad()
    ae = private.autoencoder

    def plain(module, args, hidden):
        code = ae.encode(hidden)
        norm = code.flatten(1).norm(dim=1)[:, None, None]
        return ae.decode(code * (0.5 / norm).clamp(max=1))

    hook = private.blocks.blocks[1].register_forward_hook(plain)
    model(**inputs).logits.square().sum().backward()
    hook.remove()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, atol=1e-5), name


def test_kept_releases_are_used_after_a_restart(tmp_path):
    options = {"noise": ewft.release_once(8.0, DELTA), "output_dir": tmp_path, "unsafe_seed": None}
    model = build("bert")
    private = trained(model, **options)
    inputs = batch("bert", rows=ROWS, tokens=TOKENS)
    three = {key: value[:3] for key, value in inputs.items()}
    private.set_epoch(1)
    first = seen_after(private, 1, lambda: model(**three, example_ids=torch.arange(3)))
    state = private.state_dict()
    private.remove()
    again = attach(model, options["noise"], autoencoder=(6, 3), output_dir=tmp_path, resume=True, unsafe_seed=None)
    with pytest.raises(accounting.BudgetExceeded, match="released already"):
        again.set_epoch(1)
    again.load_state_dict(state)
    again.set_epoch(2)
    assert torch.equal(seen_after(again, 1, lambda: model(**three, example_ids=torch.arange(3))), first)
    # Record 3 may have been released after the state was kept: nobody knows, so it costs another release.
    with pytest.raises(accounting.BudgetExceeded, match="allow_again"):
        model(**inputs, example_ids=torch.arange(4))
    again.allow_again(1)
    model(**inputs, example_ids=torch.arange(4))
    assert again.ledger.spent_steps == 2
    assert again.epsilon() > 8.5


def frozen_base(model):
    """As people train a head: the base in evaluation mode, to have no dropout."""
    model.train()
    model.base_model.eval()
    return model


def base_without_gradients(model):
    """As some models do for a frozen base, whatever the mode."""
    model.base_model.forward = torch.no_grad()(model.base_model.forward)
    return model.eval()


@pytest.mark.parametrize("mode", [frozen_base, torch.nn.Module.eval, base_without_gradients])
def test_training_is_paid_for_in_any_mode(mode):
    model = mode(build("bert"))
    private = attach(model, ewft.dp_forward(2, 8.0, DELTA), unsafe_seed=None)
    for inputs in (numbered(), full_batch("bert")):
        with pytest.raises(RuntimeError, match="set_epoch"):
            model(**inputs)
    private.set_epoch(1)
    with pytest.raises(ValueError, match=r"evaluate under model.eval\(\)"):
        model(**full_batch("bert"))
    model(**numbered()).loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        model(**numbered())
    private.set_epoch(2)
    model(**numbered()).loss.backward()
    assert private.inference_releases == 0
    assert private.epsilon() == pytest.approx(8.0, rel=1e-4)
    assert not any("inference queries" in assumption for assumption in private.card()["assumptions"])


def test_records_by_id_are_released_for_training_and_a_refused_pass_leaves_nothing_behind():
    model = build("bert").eval()
    private = attach(model, ewft.dp_forward(1, 8.0, DELTA))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="set_epoch"):
            model(**numbered())
        with pytest.raises(ValueError, match="pad"):
            model(**batch("bert", rows=2, tokens=TOKENS - 1), example_ids=torch.tensor([0, 1]))
        private.read_layer(full_batch("bert"), "code")
        model(**full_batch("bert"))
    assert private.inference_releases == 2 * ROWS


def test_epochs_and_their_counts(tmp_path):
    model = build("bert")
    private = trained(model, output_dir=tmp_path, unsafe_seed=None)
    inputs = numbered()
    assert private.epsilon() == 0
    with pytest.raises(ValueError, match="epochs 1 to 2"):
        private.set_epoch(3)
    private.set_epoch(1)
    model(**inputs)
    half = private.epsilon()
    private.set_epoch(2)
    model(**inputs)
    # The same batch again, as of a loader that draws with replacement or was begun anew, would be a second release.
    with pytest.raises(RuntimeError, match="second time"):
        model(**{key: value[:1] for key, value in inputs.items()})
    with pytest.raises(RuntimeError, match="released already"):
        private.set_epoch(1)
    assert half < private.epsilon() == pytest.approx(8.0, rel=1e-4)
    private.remove()
    again = attach(model, ewft.dp_forward(2, 8.0, DELTA), output_dir=tmp_path, resume=True)
    with pytest.raises(accounting.BudgetExceeded, match="allow_again"):
        again.set_epoch(2)


def test_records_are_told_apart_or_the_card_says_that_they_were_not():
    inputs = batch("bert", rows=ROWS, tokens=TOKENS)
    model = build("bert")
    private = trained(model, noise=ewft.dp_forward(2, 8.0, DELTA))
    private.set_epoch(1)
    with pytest.raises(ValueError, match="example_ids"):
        model(**inputs)
    assert not any("nobody checked" in assumption for assumption in private.card()["assumptions"])
    private.remove()
    trusting = trained(model, noise=ewft.dp_forward(2, 8.0, DELTA), unchecked_records=True)
    trusting.set_epoch(1)
    model(**inputs)
    with pytest.raises(RuntimeError, match="more than dataset_size"):
        model(**inputs)
    assert any("nobody checked" in assumption for assumption in trusting.card()["assumptions"])
    trusting.remove()
    with pytest.raises(ValueError, match="leave unchecked_records out"):
        attach(model, ewft.release_once(8.0, DELTA), unchecked_records=True)


PRINTED = ewft.paper([0.46, 0.42], 8.0, DELTA)
SOUND = ewft.dp_forward(2, 8.0, DELTA)


@pytest.mark.parametrize(
    ("begun", "changed", "named"),
    [
        (SOUND, {"noise": ewft.dp_forward(2, 4.0, DELTA)}, "noise_std_over_max_norm"),
        (PRINTED, {"noise": ewft.NoiseSchedule("mine", PRINTED.ratios, DELTA)}, "mechanism"),
        (PRINTED, {"noise": ewft.NoiseSchedule(PRINTED.name, PRINTED.ratios, DELTA)}, "flaws"),
        (SOUND, {"dataset_size": ROWS + 3}, "dataset_size"),
        (SOUND, {"bottom": "trained"}, "flaws"),
        (SOUND, {"unchecked_records": True}, "unchecked_records"),
        (SOUND, {"layer": "output"}, "layer"),
        (SOUND, {"max_norm": 2.5}, "max_norm"),
    ],
)
def test_a_ledger_goes_on_under_the_same_arguments_alone(tmp_path, begun, changed, named):
    model = build("bert")
    settings = {"noise": begun, "output_dir": tmp_path}
    with pytest.raises(ValueError, match="leave resume out"):
        attach(model, **settings, resume=True)
    attach(model, **settings).remove()
    with pytest.raises(ValueError, match="resume=True to continue it, or another output_dir"):
        attach(model, **settings)
    with pytest.raises(ValueError, match=f"another {named}; resume with the same arguments"):
        attach(model, **{**settings, **changed}, resume=True)
    attach(model, **settings, resume=True).remove()


def test_one_perturbation_a_model():
    model = build("bert")
    first = attach(model)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type=task_type("bert"), r=2, target_modules=["query"]))
    for same in (model, wrapped):
        with pytest.raises(ValueError, match=r"call remove\(\) on the first"):
            attach(same)
    first.remove()
    attach(model)


def test_the_card_holds_and_says_what_is_not_covered():
    model = build("bert")
    private = trained(model)
    for epoch in (1, 2):
        private.set_epoch(epoch)
        model(**numbered())
    model.eval()
    with torch.no_grad():
        model(**full_batch("bert"), labels=torch.zeros(ROWS, dtype=torch.int64))
    private.stream.reproducible = False  # as from the operating system; the seed here is for the test alone
    card = private.card()
    assert card["guarantee"] == "differential privacy"
    assert card["adjacency"] == "replace_one"
    assert card["epsilon"]["upper_bound"] == pytest.approx(8.0, rel=1e-4)
    assert accounting.verify(card)
    assert any("label" in entry for entry in card["unprotected"])
    assert any(f"{ROWS} were made" in note for note in card["notes"])
    assert any("inference queries" in assumption for assumption in card["assumptions"])
    assert private.inference_epsilon() == pytest.approx(
        accounting.epsilon(accounting.gaussian(private.noise.ratios[-1]), DELTA, adjacency="replace_one")
    )
    assert private.inference_epsilon(3) > private.inference_epsilon()
    assert attach(build("bert"), PRINTED, unsafe_seed=None).card()["guarantee"] == "none"


def test_labels_that_are_the_text_void_the_guarantee():
    model = build("gpt2").train()
    private = attach(model, ewft.dp_forward(1, 8.0, DELTA))
    private.set_epoch(1)
    model(**numbered("gpt2"))
    assert any("labels" in flaw for flaw in private.flaws())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_releases_once(reentrant, monkeypatch):
    model = build("bert")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    private = trained(model)
    private.set_epoch(1)
    drawn, noised = [], ops.clip_noise
    monkeypatch.setattr(
        ops, "clip_noise", lambda code, *rest, **how: drawn.append(len(code)) or noised(code, *rest, **how)
    )
    model(**numbered()).loss.backward()
    assert drawn == [ROWS]
    assert all(p.grad is not None for name, p in model.named_parameters() if "layer.1" in name)


def test_trainer_moves_the_noise(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    from fastdp.integrations.epochs import EpochCallback

    model = build("bert")
    private = trained(model)
    inputs = batch("bert", rows=ROWS, tokens=TOKENS)
    rows = [{key: value[i] for key, value in inputs.items()} | {"example_ids": i} for i in range(ROWS)]
    stds, noised = [], ops.clip_noise

    def noted(code, bound, std, *rest, **how):
        stds.append(std / bound)
        return noised(code, bound, std, *rest, **how)

    monkeypatch.setattr(ops, "clip_noise", noted)
    private.noise = ewft.NoiseSchedule("falling", (3.0, 2.0), DELTA)
    arguments = TrainingArguments(
        tmp_path,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows, callbacks=[EpochCallback(private)]).train()
    assert stds == [3.0, 3.0, 2.0, 2.0]
    assert sum(private.ledger.spent(kind) for kind in private.ledger.kinds) == 2


def test_refusals():
    model = build("bert").eval()
    for layer in (3, -1, "encoder", 1.5, True, "encoder.layer.0.attention", "encoder.layer.7", ""):
        with pytest.raises(ValueError, match="blocks 1 to 2.*or the module of one of them"):
            attach(model, layer=layer)
    with pytest.raises(ValueError, match="32 wide"):
        attach(model, autoencoder=ewft.StackedAutoencoder(16, (4,)))
    for option, value, match in (
        ("max_norm", 0.0, "max_norm"),
        ("sequence_length", 0, "sequence_length"),
        ("dataset_size", 1.5, "dataset_size"),
        ("bottom", "half", "bottom"),
        ("lengths", "short", "lengths"),
    ):
        with pytest.raises(ValueError, match=match):
            attach(model, **{option: value})
    with pytest.raises(ValueError, match="t5 model"):
        attach(build("t5"))
    private = attach(model)
    with pytest.raises(ValueError, match="pad"):
        model(**batch("bert", rows=2, tokens=TOKENS - 1))
    for ids, match in (([0, 9], "between 0"), ([1, 1], "twice")):
        with pytest.raises(ValueError, match=match):
            model(**full_batch("bert", 2), example_ids=torch.tensor(ids))
    model.train()
    private.set_epoch(1)
    with pytest.raises(ValueError, match="one for each"):
        model(**full_batch("bert", 2), example_ids=torch.tensor([0]))


@torch.no_grad()
def test_a_classifier_that_reads_the_last_token_needs_padding_on_the_left():
    import transformers as hf

    config = hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0, num_labels=2)
    model = hf.GPT2ForSequenceClassification(config).eval()
    attach(model)
    inputs = batch("gpt2", rows=ROWS, tokens=TOKENS)
    inputs.pop("labels")
    with pytest.raises(ValueError, match="pad on the left"):
        model(**inputs)
    # Without a mask, and with one that says otherwise, the model finds the last token by its padding.
    inputs["input_ids"] = inputs["input_ids"].clamp(min=1) * inputs["attention_mask"]
    for mask in ({}, {"attention_mask": torch.ones_like(inputs["attention_mask"])}):
        with pytest.raises(ValueError, match="pad on the left"):
            model(input_ids=inputs["input_ids"], **mask)
    model(**{key: value.flip(1) for key, value in inputs.items()})


@pytest.mark.parametrize(("made", "settings"), [(fastdp.EWFT, ewft.EWFTSettings), (ewft.PureEWFT, ewft.NoisePlace)])
def test_its_signature_spells_every_setting_with_type_and_default(made, settings):
    shown = inspect.signature(made).parameters
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in shown.values())
    for field in dataclasses.fields(settings):
        missing = field.default is dataclasses.MISSING
        assert shown[field.name].default == (inspect.Parameter.empty if missing else field.default), field.name
        assert str(shown[field.name].annotation) == str(field.type), field.name


def t5():
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2}
    return transformers.T5EncoderModel(transformers.T5Config(**sizes, dropout_rate=0.0))


@torch.no_grad()
def test_another_architecture_is_perturbed_at_a_module():
    model, inputs = t5().eval(), full_batch("bert")
    for options, match in (({"layer": "encoder.block.1"}, "lengths='public'"), ({"layer": 1}, "get_submodule")):
        with pytest.raises(ValueError, match=match):
            attach(model, **options)
    plain = model(**inputs).last_hidden_state
    private = attach(model, layer=model.encoder.block[1], max_norm=1e6, lengths="public")
    assert private.settings.layer == private.card()["mechanism"]["layer"] == "encoder.block.1"
    assert torch.allclose(model(**inputs).last_hidden_state, plain, atol=1e-5)
    frozen = private.frozen_parameters
    assert "shared.weight" in frozen
    assert not any(".block.2." in name or "final" in name for name in frozen)
    private.remove()
    noisy = ewft.release_once(8.0, DELTA)
    private = attach(model, layer="encoder.block.1", noise=noisy, lengths="public", unsafe_seed=None)
    assert not torch.allclose(model(**inputs).last_hidden_state, plain, atol=1e-2)
    assert private.inference_releases == ROWS
    private.set_epoch(1)
    model(**inputs, example_ids=torch.arange(ROWS))
    assert private.epsilon() == pytest.approx(8.0, abs=0.1)


@torch.no_grad()
def test_in_another_architecture_a_path_past_the_layer_is_found():
    model = t5()
    private = attach(model, layer="encoder.block.1.layer.0.SelfAttention", lengths="public")
    private.set_epoch(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="although the layer's output was fixed"):
            model(**full_batch("bert"), example_ids=torch.arange(ROWS))
    private.remove()
    private = attach(model.eval(), layer="encoder.block.1.layer.1", lengths="public")  # its residual sum is inside
    model(**full_batch("bert"))
    assert private.inference_releases == ROWS
