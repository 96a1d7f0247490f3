"""Mixtures of experts: each token's part in the experts that it was sent to is its own row's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastdp.ops as ops
from fastdp.engine.capture.memory import kept_bytes
from fastdp.engine.uses.experts import ExpertFactors
from fastdp.engine.uses.layout import Ticket
from fastdp.verify import Checks
from tests.cases import cases, pairs
from tests.engine.nets import Net, exact_batches
from tests.engine.reference import (
    assert_exact_step,
    engine_for,
    feed,
    norms,
    relative,
    require_exact,
    stepped,
    ticket,
)
from tests.engine.runs import collate, examples, one_by_one

ROWS, TOKENS, WORDS, WIDTH, HIDDEN, EXPERTS = 5, 11, 61, 24, 40, 5
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
EXACT = 1e-5


def stock(name: str, implementation: str = "grouped_mm") -> nn.Module:
    import transformers as hf

    torch.manual_seed(3)
    model: Any
    if name == "mixtral":
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**SHAPE, num_local_experts=EXPERTS))
    elif name == "qwen3-moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 20, "head_dim": 12}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SHAPE, **own))
    else:
        model = hf.GptOssForCausalLM(hf.GptOssConfig(**SHAPE, num_local_experts=EXPERTS, head_dim=12))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.set_experts_implementation(implementation)
    return model.train()  # type: ignore[no-any-return]


def texts(rows: int = ROWS, seed: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[1, 6:] = -100
    return {"input_ids": ids, "labels": labels}


def together(units: list[dict[str, torch.Tensor]], owners: list[int]) -> list[dict[str, torch.Tensor]]:
    """The gradients of units of several rows."""
    return [
        {name: sum(unit[name] for unit, own in zip(units, owners) if own == owner) for name in units[0]}
        for owner in sorted(set(owners))
    ]


#: The first two hold their experts in one kind of module.
MIXTURES = [("mixtral", "grouped_mm"), ("qwen3-moe", "batched_mm"), ("mixtral", "eager")]
MIXTURES += [("gpt-oss", implementation) for implementation in ("grouped_mm", "batched_mm", "eager")]


@cases("name, implementation", MIXTURES)
def test_stock_mixtures(name: str, implementation: str) -> None:
    assert_exact_step(stock(name, implementation), texts(), one_by_one(stock(name, "eager"), texts()))


@cases("checkpointing, two_pass", [(None, True), (False, False), (False, True), (True, False)])
def test_units_of_several_rows(checkpointing: bool | None, two_pass: bool) -> None:
    """With and without checkpoints, reentrant ones and others, in one backward pass and in two."""
    owners = [0, 0, 1, 2, 2]
    units = together(one_by_one(stock("gpt-oss", "eager"), texts()), owners)
    model = stock("gpt-oss")
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})  # type: ignore[operator]
    given = Ticket(torch.tensor(owners), torch.ones(3), True)
    assert_exact_step(model, texts(), units, given, two_pass=two_pass)


class Routed(nn.Module):
    """Tokens go to two experts each, by their ids, so that no rounding decides which."""

    def __init__(self, shape: tuple[int, int] = (12, 8), stored: str = "out first", masks: bool = False):
        super().__init__()
        torch.manual_seed(1)
        out, width = shape
        self.stored, self.masks = stored, masks
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(out, WORDS)
        self.stack = nn.Parameter(torch.randn(EXPERTS, *(shape if stored == "out first" else shape[::-1])))
        self.bias = nn.Parameter(torch.randn(EXPERTS, out))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = self.table(ids).flatten(0, 1)
        # The last of the experts gets no token.
        kinds = (ids.flatten().unsqueeze(1) * torch.tensor([1, 2]) % (EXPERTS - 1)).flatten()
        found, order = torch.sort(kinds)
        ends = torch.histc(found.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        stack = self.stack.mT if self.stored == "out first" else self.stack
        given = tokens[order // 2]
        outside = (found >= EXPERTS).unsqueeze(-1) if self.masks else None
        if outside is not None:
            found.clamp_(max=EXPERTS - 1)
            given.masked_fill_(outside, 0.0)
        if given.dtype == torch.float64:
            product = torch.cat([x @ w for x, w in zip(given.tensor_split(ends[:-1].long()), stack)])
        else:
            product = torch._grouped_mm(given, stack, offs=ends)
        product = torch.tanh(product + self.bias[found])
        if outside is not None:
            product = product.masked_fill(outside, 0.0)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        mixed = product[back].view(*ids.shape, 2, -1).sum(2)
        return {"loss": F.cross_entropy(self.head(mixed).flatten(0, 1), labels.flatten())}


def routed(rows: int = ROWS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "labels": ids.flip(1)}


@cases(
    *pairs(
        ("shape", [(12, 8), (4, 20), (132, 68), (64, 64)]),
        ("stored", ["out first", "in first"]),
        # As transformers before 5.18 masks those that another device's experts take.
        ("masks", [False, True]),
    )
)
def test_stacks_of_any_shape(shape: tuple[int, int], stored: str, masks: bool) -> None:
    """Narrow ones, which are measured directly, wide and square ones; one expert gets no token."""
    engine = assert_exact_step(Routed(shape, stored, masks), routed())
    assert not engine.accumulator.sums["stack"][-1].any()
    # Runs too long for Gram matrices, and units whose norms are found again as they cancel.
    assert_exact_step(Routed((72, 80)), routed(3, 400))


def test_later_batches_of_other_lengths_stay_exact() -> None:
    model = Routed()
    engine, tickets = engine_for(model, 0.7)
    for rows, tokens in ((4, 6), (3, 9), (1, 5), (6, 1)):
        data = routed(rows, tokens)
        feed(engine, tickets, data)
        require_exact(engine, one_by_one(model, data))


class Computed(Routed):
    """Routed by a stack that a function makes of the module's own."""

    def __init__(self, made: Callable[[Any, torch.Tensor], torch.Tensor], shape: tuple[int, int] = (12, 8)):
        super().__init__(shape)
        self.made = made
        self.down = nn.Parameter(torch.randn(EXPERTS * 3, shape[1]))
        self.up = nn.Parameter(torch.randn(shape[0], 3 * EXPERTS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        own = self._parameters.pop("stack")
        assert own is not None
        try:
            self.stack = self.made(self, own)  # type: ignore[assignment]
            return super().forward(ids, labels)
        finally:
            del self.stack
            self.stack = own  # type: ignore[assignment]


def factors_of(net: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """LoRA's adapters as PEFT lays them out: of the one each expert has rows, of the other every fifth column."""
    return net.up.view(len(net.up), 3, EXPERTS).permute(2, 0, 1), net.down.view(EXPERTS, 3, -1)


def used(units: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Without parameters that nobody's gradient reaches."""
    names = [name for name in units[0] if any(unit[name].any() for unit in units)]
    return [{name: unit[name] for name in names} for unit in units]


MADE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a scaled stack": lambda net, own: 2 * own,
    "adapters": lambda net, own: torch.baddbmm(own, *factors_of(net), alpha=0.5),
    "adapters of a constant": lambda net, own: torch.baddbmm(own.detach(), *factors_of(net)),
    "adapters by a product": lambda net, own: own + torch.bmm(*factors_of(net)) / 2,
    "adapters of 64 bits": lambda net, own: own + (torch.matmul(*[f.double() for f in factors_of(net)])).to(own.dtype),
    "a turned product": lambda net, own: (factors_of(net)[1].mT @ factors_of(net)[0].transpose(1, 2)).mT + own,
}


@cases("name", MADE)
@cases("shape", [(12, 8), (80, 72)])
def test_stacks_that_are_made_of_parameters(name: str, shape: tuple[int, int]) -> None:
    assert_exact_step(Computed(MADE[name], shape), routed(), used(one_by_one(Computed(MADE[name], shape), routed())))


@cases("made", [lambda net, own: own.tanh(), lambda net, own: own.flip(0), lambda net, own: own[[1, 0, 2, 3, 4]]])
def test_stacks_that_no_factors_lead_to_are_run_one_at_a_time(made: Any) -> None:
    engine, tickets = engine_for(Computed(made, (8, 8)), 0.5)
    tickets.append(ticket(ROWS))
    with pytest.warns(UserWarning, match="one-example route"):
        loss = engine.model(**routed())["loss"]
    loss.backward()
    units = one_by_one(Computed(made, (8, 8)), routed())
    scales = (0.5 / norms(units)).clamp(max=1)
    wanted = sum(scale * unit["stack"] for scale, unit in zip(scales, units))
    assert relative(engine.accumulator.sums["stack"], wanted) < 1e-4


def adapted(name: str, implementation: str, *, checkpointing: bool | None = None, **options: Any) -> Any:
    """A stock mixture whose experts' own matrices have adapters, none of which is zero."""
    import peft

    base: Any = stock(name, implementation)
    parts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(**{"r": 3, "target_modules": [], "target_parameters": parts, **options})
    model = peft.get_peft_model(base, config)
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    if checkpointing is not None:
        base.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    return model.train()


@cases("name, implementation", MIXTURES)
def test_adapters_of_experts_own_matrices(name: str, implementation: str) -> None:
    engine = assert_exact_step(adapted(name, implementation), texts(), one_by_one(adapted(name, "eager"), texts()))
    # PEFT sets adapted parameters to themselves in every forward pass.
    state = cast(Checks, engine.checks).state
    assert len(state.rewritten) == 4
    state.require_settled(engine.parameters)


@cases("checkpointing, two_pass", [(False, True), (True, False)])
def test_adapters_of_experts_under_checkpoints(checkpointing: bool, two_pass: bool) -> None:
    """Beside those of a layer, and the router's, in units of several rows."""
    options: dict[str, Any] = {"target_modules": ["q_proj"], "use_rslora": True}
    options["target_parameters"] = ["mlp.experts.down_proj", "mlp.gate.weight"]
    owners = [0, 0, 1, 2, 2]
    units = together(one_by_one(adapted("qwen3-moe", "eager", **options), texts()), owners)
    model = adapted("qwen3-moe", "grouped_mm", checkpointing=checkpointing, **options)
    given = Ticket(torch.tensor(owners), torch.ones(3), True)
    assert_exact_step(model, texts(), units, given, two_pass=two_pass)


@cases("adapters", [False, True])
def test_memory_is_that_of_the_tokens_that_experts_get(adapters: bool) -> None:
    """And not of whole stacks."""
    model = adapted("mixtral", "grouped_mm") if adapters else stock("mixtral")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name if adapters else "experts" in name)
    engine = stepped(model, texts(), 0.5)
    tokens, widths = ROWS * TOKENS * SHAPE["num_experts_per_tok"], (WIDTH + 2 * HIDDEN) + (HIDDEN + WIDTH)
    found = kept_bytes(engine.trace, engine.read, ROWS, ROWS, 1.0, torch.device("cpu"))
    assert 1 <= found / (SHAPE["num_hidden_layers"] * tokens * widths * 4) < (1.2 if adapters else 1.001)


@cases("shape", [(6, 5), (72, 80)])
@cases("tokens", [0, 1, 300])
def test_norms_of_a_stack_are_those_of_its_units_gradients(shape: tuple[int, int], tokens: int) -> None:
    """Squares and absolute values of units whose tokens are spread over matrices, some of which have none."""
    torch.manual_seed(0)
    units, (m, n) = 3, shape
    left, right = torch.randn(tokens, m), torch.randn(tokens, n)
    matrices, owners = torch.randint(0, EXPERTS - 1, (tokens,)), torch.randint(0, units, (tokens,))
    layout = Ticket(torch.arange(units), torch.ones(units), True).layout(torch.device("cpu"))
    use = ExpertFactors.of_tokens(left, right, matrices * units + owners, EXPERTS, units)
    truth = torch.zeros(units, EXPERTS, m, n, dtype=torch.float64)
    truth.index_put_((owners, matrices), torch.einsum("tm,tn->tmn", left.double(), right.double()), accumulate=True)
    squares, products = use.powers(layout)
    assert torch.allclose(squares.double(), truth.square().sum((1, 2, 3)), rtol=1e-5)
    assert bool((products.square() * (1 + 1e-9) >= truth.square().sum((1, 2, 3))).all())
    sizes = use.by_unit(ops.abs_sum(use.left, use.right, use.offsets(layout)))
    assert torch.allclose(sizes, truth.abs().sum((1, 2, 3)), rtol=1e-5)
    weights, total = torch.tensor([1.0, 0.0, 0.5]), torch.zeros(EXPERTS, m * n)
    use.add_to(total, weights, layout)
    wanted = torch.einsum("u,uemn->emn", weights.double(), truth).flatten(1)
    assert torch.allclose(total.double(), wanted, atol=1e-4)
    own = torch.zeros_like(total)
    use.unit_to(own, 2, use.offsets(layout).tolist())
    assert torch.allclose(own.double(), truth[2].flatten(1), atol=1e-4)


class Counted(Routed):
    """A loop over experts that counts in one tensor."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens, kinds = self.table(ids).flatten(0, 1), ids.flatten() % (EXPERTS - 1)
        mixed, expert = tokens.new_zeros(len(tokens), self.bias.shape[1]), torch.zeros((), dtype=torch.long)
        for _ in range(EXPERTS - 1):
            where = (kinds == expert).nonzero().flatten()
            mixed = mixed.index_add(0, where, F.linear(tokens[where], self.stack[expert]).tanh())
            expert += 1
        logits = self.head(mixed + self.bias[0])
        return {"loss": F.cross_entropy(logits, labels.flatten())}


def test_a_loop_over_experts_may_count_in_one_tensor() -> None:
    assert_exact_step(Counted(), routed())


def test_experts_that_a_later_batch_reads_first() -> None:
    """A loop that leaves out experts without tokens: the first batch has tokens for one of two."""

    def sparse(net: Any, h: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(h)
        for positive, expert in ((True, net.one), (False, net.two)):
            where = ((h[:, 0] > 0) == positive).nonzero().flatten()
            if len(where):
                out = out.index_add(0, where, expert(h[where]))
        return out

    def model() -> nn.Module:
        net = Net(sparse, one=nn.Linear(6, 6), two=nn.Linear(6, 6))
        with torch.no_grad():
            net.one.weight.fill_(0.1).add_(torch.eye(6))
            net.two.weight.copy_(net.one.weight.flip(0))
            net.one.bias.fill_(0.2)
            net.two.bias.fill_(-0.1)
        return net

    every = collate(examples(24))
    above = torch.tanh(model().first(every["x"]))[:, 0] > 0  # type: ignore[operator]
    assert 4 < int(above.sum()) < 20
    chosen = (above.nonzero().flatten()[:5], torch.arange(6, 12), (~above).nonzero().flatten()[:3])
    exact_batches(model, [{name: t[rows] for name, t in every.items()} for rows in chosen])
