"""Split models: both halves together compute what the whole does, and neither holds the other's weights."""

import copy

import peft
import pytest
import torch

from fastdp.methods.sap import split_model
from tests.cases import cases
from tests.engine.models import batch, build, lora_targets, task_type

FAMILIES = ["bert", "roberta", "gpt2", "llama"]


def inputs_of(name):
    inputs = batch(name)
    inputs.pop("labels")
    return inputs


@cases("name", FAMILIES)
def test_names_stay_and_weights_are_apart(name):
    model = build(name)
    state = model.state_dict()
    bottom, top = split_model(model, 1)
    for key, value in top.state_dict().items():
        assert torch.equal(value, state[key])
    base = model.base_model.state_dict()
    kept = bottom.model.state_dict()
    assert all(torch.equal(value, base[key]) for key, value in kept.items())
    blocks = ("layer.", "h.", "layers.")
    assert not any(f"{prefix}1." in key for key in kept for prefix in blocks)
    assert not any("pooler" in key or key == "norm.weight" or "ln_f" in key for key in kept)
    assert not any(f"{prefix}0." in key for key in top.state_dict() for prefix in blocks)
    shared = {p.data_ptr() for p in model.parameters()}
    assert not any(p.data_ptr() in shared for p in bottom.parameters())
    assert not any(p.requires_grad for p in bottom.parameters())
    assert all(p.requires_grad for p in split_model(model, 1, trainable_bottom=True)[0].parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_trained_on_the_top_fits_the_whole_model(name, tmp_path):
    model, inputs = build(name).eval(), batch(name)
    bottom, top = split_model(model, 1)
    config = peft.LoraConfig(task_type=task_type(name), r=2, target_modules=lora_targets(name), init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(top), config)
    if name in ("bert", "roberta"):
        # The head is trained beside LoRA; here it stays the model's.
        inputs["labels"] = inputs["labels"] % 3
    hidden = bottom(inputs["input_ids"], inputs["attention_mask"])
    loss = adapted(inputs_embeds=hidden, attention_mask=inputs["attention_mask"], labels=inputs["labels"]).loss
    loss.backward()
    assert all("lora" in key or "classifier" in key for key, p in adapted.named_parameters() if p.grad is not None)
    adapted.save_pretrained(tmp_path)
    whole = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    inputs.pop("labels")
    apart = adapted.eval()(inputs_embeds=hidden, attention_mask=inputs["attention_mask"]).logits
    # The whole model has the adapter's names in block 0 too, where the saved adapter leaves it untouched or absent.
    for key, parameter in whole.named_parameters():
        if "lora_A" in key and any(f".{b}.0." in key for b in ("layer", "h", "layers")):
            with torch.no_grad():
                parameter.zero_()
    together = whole(**inputs).logits
    real = inputs["attention_mask"].bool() if apart.dim() == 3 else slice(None)
    assert torch.allclose(together[real], apart[real], atol=1e-5)


def test_half_precision_stays_so():
    model = build("gpt2").to(torch.bfloat16).eval()
    bottom, top = split_model(model, 1)
    hidden = bottom(**inputs_of("gpt2"))
    assert hidden.dtype == torch.bfloat16
    assert top(inputs_embeds=hidden).logits.dtype == torch.bfloat16


def test_a_block_may_be_named_by_its_module_or_its_dotted_name():
    model = build("bert")
    (expected, _), inputs = split_model(model, 1), inputs_of("bert")
    for after in (model.bert.encoder.layer[0], "bert.encoder.layer.0"):
        bottom, _ = split_model(model, after)
        assert torch.equal(bottom.eval()(**inputs), expected.eval()(**inputs))
    assert not any("encoder" in name for name in split_model(model, model.bert.embeddings)[0].state_dict())


def test_refusals():
    model = build("bert")
    with pytest.raises(ValueError, match="the module of one of them"):
        split_model(model, "bert.encoder.layer.0.attention")
    for after in (-1, 3, 1.0, True):
        with pytest.raises(ValueError, match="0 to 2 blocks"):
            split_model(model, after)
    _, top = split_model(model, 1)
    with pytest.raises(ValueError, match="inputs_embeds, not input_ids"):
        top(**inputs_of("bert"))
