"""The bottom that arrives computes what the vendor's does, and holds nothing above it."""

import json
import socket
import time

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForSequenceClassification, GraniteConfig, GraniteForCausalLM

from fastdp.methods.sap import Bottom, split_model
from fastdp.split.bottom import PackedBottom, pack_bottom, published_bottom, unpack_bottom
from tests.cases import cases
from tests.engine.models import batch, build


@cases("name, after", [("bert", 0), ("roberta", 1), ("gpt2", 0), ("llama", 1), ("qwen3", 1)])
def test_it_arrives_whole(name, after, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp(name)
    bottom, _ = split_model(build(name).eval(), after)
    packed = pack_bottom(bottom, tmp_path)
    found = unpack_bottom(packed, after)
    inputs = batch(name)
    inputs.pop("labels")
    assert torch.equal(found(**inputs), bottom.eval()(**inputs))
    assert not any(p.requires_grad for p in found.parameters())
    with safe_open(packed.path, "pt") as file:
        sent = set(file.keys())
    assert sent == set(bottom.state_dict())
    assert pack_bottom(bottom, tmp_path / "again").digest == packed.digest


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "llama"])
def test_a_bottom_is_compared_with_the_published_model(name, tmp_path):
    """Also where that is kept in half precision; one row that the vendor moved far away is found."""
    model = build(name).eval()
    model.half().save_pretrained(tmp_path / "published")
    bottom, _ = split_model(model.float(), 1)
    found, inputs = published_bottom(bottom, 1, tmp_path / "published"), batch(name)
    inputs.pop("labels")
    torch.testing.assert_close(found(**inputs), bottom.eval()(**inputs), atol=1e-3, rtol=0)
    table = bottom.model.get_input_embeddings().weight
    with torch.no_grad():
        table[3] *= 1000
    with pytest.raises(ValueError, match="is not the published model's"):
        published_bottom(bottom, 1, tmp_path / "published")
    with pytest.raises(ValueError, match="no .safetensors"):
        published_bottom(bottom, 1, tmp_path)


def test_a_setting_of_the_vendor_s_scales_no_row_of_a_published_model(tmp_path):
    """Noise on rows would hide nothing of rows a million times as long."""
    config = GraniteConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        embedding_multiplier=12.0,
    )  # fmt: skip
    model = GraniteForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "published")
    packed = pack_bottom(split_model(model, 0)[0], tmp_path)
    changed = packed.config.replace('"embedding_multiplier":12.0', '"embedding_multiplier":1e7')
    ids = torch.arange(5)[None]
    honest, scaled = (
        unpack_bottom(PackedBottom(packed.path, each, packed.digest), 0) for each in (packed.config, changed)
    )
    assert scaled(ids).norm() > 1e5 * honest(ids).norm()
    torch.testing.assert_close(published_bottom(scaled, 0, tmp_path / "published")(ids), honest(ids))


def test_refusals(tmp_path):
    packed = pack_bottom(split_model(build("bert"), 1)[0], tmp_path)
    assert isinstance(unpack_bottom(packed, 1), Bottom)
    wide = packed.config.replace('"hidden_size":32', '"hidden_size":320000')
    other = packed.config.replace('"bert"', '"t5"')
    for changed, after, match in (
        (packed, 0, "not those of its config"),
        (PackedBottom(packed.path, packed.config, "0" * 64), 1, "not those that the vendor announced"),
        (PackedBottom(packed.path, wide, packed.digest), 1, "not those of its config"),
        (PackedBottom(packed.path, other, packed.digest), 1, "cannot be used"),
        (PackedBottom(packed.path, "{}", packed.digest), 1, "cannot be used"),
        (PackedBottom(tmp_path / "none", packed.config, packed.digest), 1, "cannot be used"),
    ):
        with pytest.raises(ValueError, match=match):
            unpack_bottom(changed, after)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "stranger/attention"},
        {"_attn_implementation": "stranger/attention"},
        {
            "model_type": "detr",
            "backbone": "stranger/backbone",
            "use_pretrained_backbone": True,
            "use_timm_backbone": False,
        },
        {"model_type": ["bert"]},
        {"auto_map": {"AutoModel": "code.Model"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_labels": 10**9},
        {"num_hidden_layers": 10**9},
        {"model_type": "qwen3", "num_hidden_layers": 10**9},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"id2label": {"0": "x"}},
        {"_name_or_path": "stranger/model"},
    ],
    ids=str,
)
def test_a_config_builds_nothing_but_a_bottom_and_looks_nothing_up(settings, tmp_path, monkeypatch):
    """A key that no such model has, or another architecture, is refused before transformers sees it."""
    packed = pack_bottom(split_model(build("bert"), 1)[0], tmp_path)
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *place, **_: asked.append(place) or [])
    hostile = PackedBottom(packed.path, json.dumps(json.loads(packed.config) | settings), packed.digest)
    begin = time.process_time()
    with pytest.raises(ValueError, match="its config has the setting|its model_type is"):
        unpack_bottom(hostile, 1)
    assert time.process_time() - begin < 5
    assert not asked


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("gptj", {"n_positions": 10**9}, "'n_positions' 1000000000: no model has more"),
        ("gptj", {"n_positions": 1 << 24, "rotary_dim": 64}, "its config asks for tables of more"),
        ("gpt_neo", {"attention_types": [[["global"], 10**8]]}, "'attention_types' 100000000: no model has more"),
    ],
    ids=str,
)
def test_a_config_asks_for_no_more_than_its_weights_show(kind, settings, words, tmp_path):
    """What is computed when a bottom is built is in no file: a vendor's config took 12 GB of its customer."""
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    own = {"rotary_dim": 4} if kind == "gptj" else {"attention_types": [[["global"], 1]], "intermediate_size": 16}
    config = AutoConfig.for_model(kind, max_position_embeddings=32, pad_token_id=0, **sizes, **own)
    model = AutoModelForSequenceClassification.from_config(config)
    packed = pack_bottom(split_model(model, 1)[0], tmp_path)
    hostile = PackedBottom(packed.path, json.dumps(json.loads(packed.config) | settings), packed.digest)
    with pytest.raises(ValueError, match=words):
        unpack_bottom(hostile, 1)


def test_a_vendor_sends_what_a_customer_takes(tmp_path):
    """Settings of a checkpoint that its architecture does not know stay with the vendor."""
    model = build("bert")
    model.config.gradient_checkpointing, model.config.custom = False, "notes of the vendor"
    packed = pack_bottom(split_model(model, 1)[0], tmp_path)
    assert "notes" not in packed.config
    unpack_bottom(packed, 1)
