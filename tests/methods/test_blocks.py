"""The places of stock models: split at each, what precedes each, and nothing passes by."""

import contextlib
import functools

import pytest
import torch
import transformers

from fastdp.methods.blocks import MODEL_TYPES, find_blocks
from fastdp.methods.ewft.mask import hide_padding
from fastdp.methods.sap import split_model
from tests.cases import cases

_TWO = "num_hidden_layers num_attention_heads num_key_value_heads n_layer n_layers num_layers n_heads num_heads"
SIZES = {
    **dict.fromkeys([*_TWO.split(), "num_experts_per_tok"], 2),
    **dict.fromkeys(("n_head", "num_experts", "num_local_experts", "rotary_dim"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim"), 24),
    **{"vocab_size": 60, "max_position_embeddings": 32, "n_positions": 32, "head_dim": 8, "pad_token_id": 0},
    **{"attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2, "layer_types": ["full_attention"] * 2},
}


@functools.cache
def build(kind):
    config = transformers.AutoConfig.for_model(kind)
    sizes = SIZES | {"embedding_size": 8 if kind == "electra" else 16}
    for name in sizes.keys() & config.to_dict().keys():
        setattr(config, name, sizes[name])
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval()


IDS = torch.randint(1, 60, (2, 7), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
every_kind = cases("kind", MODEL_TYPES)


@every_kind
@torch.no_grad()
def test_the_halves_of_every_architecture_compute_what_the_whole_does(kind):
    model = build(kind)
    whole = model(**INPUTS).last_hidden_state
    for after in range(3):
        bottom, top = split_model(model, after)
        found = top(inputs_embeds=bottom(**INPUTS), attention_mask=INPUTS["attention_mask"]).last_hidden_state
        assert torch.allclose(found, whole, atol=1e-5), after


LAYERS = ("embeddings", 1, "output")


@every_kind
def test_what_precedes_a_layer_is_what_its_gradient_reaches(kind):
    """A parameter before the layer that was not frozen would be trained on what the noise hides."""
    model = build(kind)
    blocks = find_blocks(model)
    for layer in LAYERS:
        seen = []
        hook = blocks.place(layer)[1].register_forward_hook(lambda _module, _args, out, seen=seen: seen.append(out))
        model.zero_grad()
        model(**INPUTS)
        hook.remove()
        hidden = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
        hidden.square().sum().backward()
        stated = {id(p) for part in blocks.before(layer) for p in part.parameters()}
        assert {name for name, p in model.named_parameters() if p.grad is not None and id(p) not in stated} == set()


@contextlib.contextmanager
def output_fixed(module):
    """Meanwhile a module returns what it returned first."""
    first = []
    hook = module.register_forward_hook(lambda _module, _args, out: first.append(out) or first[0])
    try:
        yield
    finally:
        hook.remove()


@every_kind
@torch.no_grad()
def test_nothing_of_a_text_passes_by_a_layer(kind):
    """With the same hidden state there, other ids make no difference."""
    model, others = build(kind), INPUTS | {"input_ids": IDS % 59 + 1}
    for layer in LAYERS:
        with output_fixed(find_blocks(model).place(layer)[1]):
            assert torch.equal(model(**INPUTS).last_hidden_state, model(**others).last_hidden_state), layer


@every_kind
@torch.no_grad()
def test_later_blocks_see_no_lengths(kind):
    """With padding hidden from the blocks after a layer, which tokens are padding makes no difference behind it."""
    model = build(kind)
    blocks, padded = find_blocks(model), INPUTS | {"attention_mask": torch.ones_like(IDS)}
    padded["attention_mask"][0, 4:] = 0
    hide = functools.partial(hide_padding, causal=blocks.causal)
    for layer in LAYERS:
        after, module = blocks.place(layer)
        hooks = [block.register_forward_pre_hook(hide, with_kwargs=True) for block in blocks.blocks[after:]]
        with output_fixed(module):
            found = [model(**inputs).last_hidden_state for inputs in (INPUTS, padded)]
        for hook in hooks:
            hook.remove()
        assert torch.equal(*found), layer


def test_another_architecture_is_refused_by_name():
    config = transformers.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="t5"):
        find_blocks(transformers.T5Model(config))
