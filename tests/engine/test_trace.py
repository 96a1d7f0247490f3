"""What a trace keeps in memory while it follows a forward pass."""

import gc
import weakref

import torch
from fastdp.bench.workloads import Case, build, private_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastdp.engine.capture.trace import Tracer
from tests.cases import cases, pairs

LAYERS, WIDTH = 8, 12


class Deep(nn.Module):
    """Layers, checkpointed or not, that count how many of their results are in memory at once."""

    def __init__(self, *, checkpointed: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)])
        self.checkpointed, self.most = checkpointed, 0
        self.made: list[weakref.ref[torch.Tensor]] = []
        for layer in self.layers:
            for module in layer:
                module.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _args: object, output: torch.Tensor) -> None:
        self.made.append(weakref.ref(output))
        self.most = max(self.most, sum(ref() is not None for ref in self.made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x.square().mean()


@cases(*pairs(("vocabulary", [None, WIDTH]), ("checkpointed", [False, True])))
def test_a_trace_keeps_nothing_that_the_model_lets_go_of(checkpointed, vocabulary):
    model = Deep(checkpointed=checkpointed)
    with torch.no_grad():
        model(torch.randn(4, 3, WIDTH))
    alone = model.most
    trace = Tracer(model, dict(model.named_parameters()), vocabulary).trace(model, ((torch.randn(4, 3, WIDTH),), {}), 4)
    assert trace.conflict is None
    assert len(trace.reads) == 2 * LAYERS
    # Of logits that might have been left out, the stand-in is in memory beside the numbers.
    assert model.most <= alone + 1


@cases("self_check", [False, True])
def test_a_first_step_leaves_no_tensor_to_be_collected(self_check):
    """A reference cycle would hold a step's activations until Python looks for some."""
    case = Case("llama", 1, 16, 32, 2, 2, 32, 2, 4)
    step = private_step(case, build(case, torch.device("cpu")), fused=True, self_check=self_check)
    gc.collect()
    gc.disable()
    try:
        step()
        before = sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)
        gc.collect()
        assert sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor) == before
    finally:
        gc.enable()
