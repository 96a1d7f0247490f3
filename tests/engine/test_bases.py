"""Bases as users have them: quantised to four bits, with activations moved off the device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from fastdp.bench.fuzz import alone

from tests.cases import cases
from tests.engine.models import batch, build, pack
from tests.engine.reference import assert_exact_step, engine_for, norms, require_exact, ticket


@cases("tuning", ["full", "lora"])
def test_activations_that_are_kept_elsewhere(tuning: str) -> None:
    model, inputs = build("llama", tuning), batch("llama")
    units = alone(copy.deepcopy(model), inputs)
    engine, tickets = engine_for(model, float(norms(units).median()))
    tickets.append(ticket(4))
    with torch.autograd.graph.save_on_cpu():
        loss = model(**inputs).loss
    loss.backward()
    require_exact(engine, units)


def test_a_base_of_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import peft
    import transformers as hf

    build("llama").save_pretrained(tmp_path)
    quantised = hf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, device_map="cpu")
    assert "4bit" in type(base.model.layers[0].mlp.up_proj).__name__
    base = peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.0))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.train()
    inputs = batch("llama")
    assert_exact_step(model, inputs, alone(model, inputs))


def test_a_base_whose_weights_are_packed() -> None:
    """What `test_a_base_of_four_bits` looks at, without its library."""
    model, inputs = pack(build("llama", "lora")), batch("llama")
    assert_exact_step(model, inputs, alone(model, inputs))
