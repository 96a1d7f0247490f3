"""The bottleneck adapter inside peft, BitFit's choice of parameters, and LoRA whose first matrix is fixed."""

import subprocess
import sys

import peft
import pytest
import torch
import transformers
from torch import nn

import fastdp
from fastdp.integrations.adapters import BottleneckConfig, BottleneckLayer, fix_lora_projections, train_biases_only
from tests.engine.models import build
from tests.engine.runs import Classifier, loader, logical_step


def logits(model):
    ids = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def randomise(model):
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3, generator=generator)


@pytest.mark.parametrize(
    "config", [peft.C3AConfig(block_size=4), peft.RandLoraConfig(r=4), peft.BOFTConfig(boft_block_size=4)]
)
def test_an_adapter_with_a_function_of_its_own_is_told_so(config):
    """Its own backward pass, or shapes, take no parameters by row: no loss is missing, and no error of torch stands alone."""
    config.target_modules = ["q_proj"]
    model = peft.get_peft_model(build("opt"), config)
    rows = [{"input_ids": torch.arange(3, 11) + i, "labels": torch.arange(3, 11) + i} for i in range(16)]
    data = loader(rows, batch_size=8, collate_fn=transformers.default_data_collator)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    private = fastdp.make_private(model, optimizer, data, noise_multiplier=1.0, target_delta=1e-3, epochs=1)
    with pytest.warns(UserWarning, match="a function of the model's own takes no parameters by row"):
        logical_step(private)
    private.detach()


def gpt_neox():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, vocab_size=64))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta", "opt", "distilbert", "gpt_neox", "phi"])
def test_bottleneck_on_stock_models(name, tmp_path):
    model, blocks = gpt_neox() if name == "gpt_neox" else build(name), 2
    before = logits(model)
    adapted = peft.get_peft_model(model, BottleneckConfig(bottleneck_size=5))
    assert sum(isinstance(module, BottleneckLayer) for module in adapted.modules()) == blocks
    assert torch.equal(logits(adapted), before), "a fresh adapter must not change the outputs"
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4 * blocks
    assert all("bottleneck_" in name for name in trained)

    randomise(adapted)
    after = logits(adapted)
    assert (after - before).abs().max() > 1e-4
    adapted.save_pretrained(tmp_path)
    plain = adapted.unload()
    assert torch.equal(logits(plain), before), "unloading must give the model back"
    assert torch.equal(logits(peft.PeftModel.from_pretrained(plain, tmp_path)), after)


def test_bottleneck_computes_the_formula():
    model = nn.Sequential()
    model.add_module("fc2", nn.Linear(6, 4))
    adapted = peft.get_peft_model(model, BottleneckConfig(bottleneck_size=3, nonlinearity="tanh"))
    randomise(adapted)
    layer = adapted.base_model.model.fc2
    down, up = layer.bottleneck_down["default"], layer.bottleneck_up["default"]
    x = torch.randn(2, 6)
    h = layer.base_layer(x)
    expected = h + torch.tanh(h @ down.weight.T + down.bias) @ up.weight.T + up.bias
    torch.testing.assert_close(adapted(x), expected)


@pytest.mark.slow
def test_bottleneck_loads_in_a_new_process_after_import_fastdp(tmp_path):
    """Although transformers looks for peft, without importing it, to see whether it is installed."""
    model = build("gpt2")
    model.save_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(model, BottleneckConfig(task_type="CAUSAL_LM"))
    randomise(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    torch.save(logits(adapted), tmp_path / "logits.pt")
    script = (
        "import fastdp, importlib.util; importlib.util.find_spec('peft'); import sys, peft, torch, transformers\n"
        "from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING as known\n"
        "assert 'BOTTLENECK' in known\n"
        "base = transformers.GPT2LMHeadModel.from_pretrained(sys.argv[1] + '/base')\n"
        "model = peft.PeftModel.from_pretrained(base, sys.argv[1] + '/adapter').eval()\n"
        "with torch.no_grad(): got = model(input_ids=torch.arange(3, 19).reshape(2, 8)).logits\n"
        "assert torch.equal(got, torch.load(sys.argv[1] + '/logits.pt'))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_second_adapter_switching_and_deletion():
    model = peft.get_peft_model(build("gpt2"), BottleneckConfig(bottleneck_size=4))
    randomise(model)
    first = logits(model)
    model.add_adapter("other", BottleneckConfig(bottleneck_size=2, nonlinearity="relu"))
    model.set_adapter("other")
    assert not torch.equal(logits(model), first)
    model.delete_adapter("other")
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_merging_is_refused_with_a_reason():
    model = peft.get_peft_model(build("llama"), BottleneckConfig())
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="cannot be merged"):
            merge()


def test_bottleneck_bad_settings():
    with pytest.raises(ValueError, match="at least 1"):
        BottleneckConfig(bottleneck_size=0)
    with pytest.raises(ValueError, match="nonlinearity"):
        BottleneckConfig(nonlinearity="swishy")
    with pytest.raises(ValueError, match="follows a linear layer"):
        peft.get_peft_model(build("gpt2"), BottleneckConfig(target_modules=["wte"]))


def test_bitfit_trains_biases_and_nothing_else():
    model = build("bert")
    trained = train_biases_only(model, also=("classifier",))
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(trained)
    assert "classifier.weight" in trained
    assert all(name.endswith("bias") for name in trained if not name.startswith("classifier"))
    assert sum(name.endswith("bias") for name in trained) == sum(
        n.endswith("bias") for n, _ in model.named_parameters()
    )


def test_bitfit_refuses_a_model_without_biases():
    with pytest.raises(ValueError, match="no bias"):
        train_biases_only(build("llama"))


class Matrices(nn.Module):
    """Two layers, and the mean of what comes out as the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 10), nn.Linear(10, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


@pytest.mark.parametrize("size", [0.01, 100.0])
def test_with_a_fixed_first_matrix_norms_are_those_of_the_whole_matrix(size):
    """|gradient of B| is the scale times |G A^T A|, G the gradient of the whole matrix, however large A was drawn and B is."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Matrices(), peft.LoraConfig(r=3, lora_alpha=6, target_modules=["first", "second"]))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        nn.init.normal_(parameter, std=size)
    assert len(fix_lora_projections(model)) == 2
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [n for n in trained if "lora_B" in n]
    x = torch.randn(1, 4, 12)
    for layer in ("first", "second"):
        lora = getattr(model.base_model.model, layer)
        a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
        assert torch.allclose(a @ a.T, torch.eye(3), atol=1e-6)
        nn.init.normal_(b, std=1e-2)
        model(x).backward()
        found = b.grad.double()
        # The same layer's own weight has the gradient of the whole matrix.
        lora.base_layer.weight.requires_grad_()
        model.zero_grad()
        model(x).backward()
        whole = lora.base_layer.weight.grad.double()
        lora.base_layer.weight.requires_grad_(False)
        model.zero_grad()
        expected = 2.0 * (whole @ a.double().T @ a.double()).norm()
        assert found.norm() == pytest.approx(float(expected), rel=1e-4)


def test_a_fixed_first_matrix_is_saved_and_loads_in_peft(tmp_path):
    torch.manual_seed(0)
    base = build("gpt2")
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True))
    fixed = fix_lora_projections(model)
    assert len(fixed) == 3
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    ids = torch.arange(1, 9)[None]
    expected = model.eval()(input_ids=ids).logits
    model.save_pretrained(tmp_path)
    fresh = build("gpt2")
    fresh.load_state_dict(weights)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
    assert torch.equal(loaded(input_ids=ids).logits, expected)


def test_fixing_needs_lora_of_a_rank_that_fits():
    with pytest.raises(ValueError, match="has no LoRA"):
        fix_lora_projections(Matrices())
    model = peft.get_peft_model(Matrices(), peft.LoraConfig(r=11, target_modules=["second"]))
    with pytest.raises(ValueError, match="rank 11 and reads 10"):
        fix_lora_projections(model)


def test_with_a_fixed_first_matrix_the_scale_is_a_learning_rate():
    """Scale, bound and steps of B by powers of two: after private steps of Adam the product is the same, to its last bits."""
    found = []
    for k in (1.0, 8.0):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            Classifier(), peft.LoraConfig(r=2, lora_alpha=2 * 0.5 * k, target_modules=["first", "second"])
        )
        fix_lora_projections(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        private = fastdp.make_private(
            model,
            torch.optim.Adam(trained, lr=0.25 / k, eps=1e-30),
            loader(),
            method=fastdp.DPSGD(max_grad_norm=0.125 * k),
            noise_multiplier=1.0,
            target_delta=1e-3,
            epochs=1,
            unsafe_seed=3,
        )
        iterator = iter(private.data_loader)
        for _ in range(3):
            logical_step(private, iterator)
        private.detach()
        layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
        found.append([layer.get_delta_weight("default").detach() for layer in layers])
    for one, other in zip(*found, strict=True):
        assert float(one.abs().max()) > 0.1
        # Norms are rounded at other places: 2^-18 of the largest entry is a hundred times the clip's own rounding.
        assert float((one - other).abs().max()) <= 2**-18 * float(one.abs().max())
