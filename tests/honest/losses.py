"""Losses: several terms, weights, distances, and terms of one's own, inside the model or in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from . import kit
from .custom import attention, outside, text_case
from .harness import ROWS, Case, program, register, register_all

WEIGHTS = (1.0, 2.0, 5.0)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Mean entropy of rows."""
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Focal loss."""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence, averaged over rows."""
    return F.kl_div(logits.log_softmax(-1), other.softmax(-1), reduction="batchmean")


def one_hot(labels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Targets of 0 and 1."""
    return F.one_hot(labels, kit.CLASSES).to(like)


#: Losses of (logits, labels).
CLASSIFYING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "focal": focal,
    "binary_with_positive_weight": lambda z, y: F.binary_cross_entropy_with_logits(
        z, one_hot(y, z), pos_weight=torch.tensor(WEIGHTS).to(z)
    ),
    "huber_plus_mse": lambda z, y: F.huber_loss(z, one_hot(y, z)) + 0.5 * F.mse_loss(z.sigmoid(), one_hot(y, z)),
    "cosine_embedding": lambda z, y: F.cosine_embedding_loss(z, one_hot(y, z), torch.ones(len(z))),
    "entropy_bonus": lambda z, y: F.cross_entropy(z, y) - 0.1 * entropy(z),
    "activation_penalty": lambda z, y: F.cross_entropy(z, y) + 0.01 * z.pow(2).mean(),
    "none_then_sum_over_rows": lambda z, y: F.cross_entropy(z, y, reduction="none").sum() / len(z),
    "dice_by_row": lambda z, y: (
        1 - 2 * (z.sigmoid() * one_hot(y, z)).sum(1) / (z.sigmoid() + one_hot(y, z)).sum(1)
    ).mean(),
}
register_all(
    CLASSIFYING, lambda f: text_case(lambda m, ids, mask, labels: f(attention(m, ids, mask), labels)), suffix="_inside"
)


@program()
def class_weights_criterion() -> Case:
    """Class weights by the documented way: a criterion of one loss a row."""

    def criterion(output: Any, batch: Any) -> torch.Tensor:
        weights = torch.tensor(WEIGHTS).to(output.logits)
        return F.cross_entropy(output.logits, batch["labels"], weight=weights, reduction="none")

    return Case(
        kit.bert(), kit.labelled(), kit.classify, lambda m, b: m(b["input_ids"], b["attention_mask"]), criterion
    )


@program("refused: weight", "torch divides by the weights of the whole batch")
def class_weights_mean_outside() -> Case:
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.tensor(WEIGHTS))  # noqa: E731
    return outside(kit.mlp(), kit.numbers(), loss=loss)


@program()
def token_means_outside() -> Case:
    """Mean over each row's own tokens, computed in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()

    return Case(kit.gpt2(), kit.id_rows(), kit.causal, loss, options=kit.MEAN)


@program()
def two_heads() -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(x))
        value = self.value(hidden).squeeze(-1)
        return 0.5 * F.cross_entropy(self.classes(hidden), y) + F.mse_loss(value, y.to(value))

    model = kit.Wrapped(
        forward, body=nn.Linear(12, kit.WIDTH), value=nn.Linear(kit.WIDTH, 1), classes=nn.Linear(kit.WIDTH, kit.CLASSES)
    )
    return Case(model, kit.numbers(), None, kit.unpack)


class TwoHeads(nn.Module):
    """Returns the outputs of two heads, or their two losses."""

    def __init__(self, losses: bool = False):
        super().__init__()
        self.losses, self.body = losses, nn.Linear(12, kit.WIDTH)
        self.classes, self.value = nn.Linear(kit.WIDTH, kit.CLASSES), nn.Linear(kit.WIDTH, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = torch.relu(self.body(x))
        found = self.classes(hidden), self.value(hidden).squeeze(-1)
        return self.both(found, y) if self.losses else found

    @staticmethod
    def both(found: Any, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(found[0], y), F.mse_loss(found[1], y.float())


@program()
def two_heads_outside() -> Case:
    return outside(TwoHeads(), kit.numbers(), loss=lambda m, b: sum(TwoHeads.both(m(*b), b[1])))


@program("refused: add its losses up", "one backward pass belongs to each batch")
def two_backward_passes() -> Case:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        first, second = TwoHeads.both(model(*batch), batch[1])
        first.backward(retain_graph=True)
        return second

    return outside(TwoHeads(), kit.numbers(), loss=loss)


@program()
def two_losses_returned() -> Case:
    """The model returns two losses, which the loop adds up."""
    return Case(TwoHeads(losses=True), kit.numbers(), None, lambda m, b: sum(m(*b)))


@program("one-example", "parameters multiply means of losses")
def learned_loss_weights() -> Case:
    """Two losses weighed by learned uncertainties (Kendall)."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = self.value(x).squeeze(-1)
        first, second = F.cross_entropy(self.classes(x), y), F.mse_loss(value, y.to(value))
        return torch.exp(-self.s[0]) * first + torch.exp(-self.s[1]) * second + self.s.sum()

    model = kit.Wrapped(forward, classes=kit.mlp(), value=kit.mlp(outputs=1), s=nn.Parameter(torch.zeros(2)))
    return Case(model, kit.numbers(), None, kit.unpack)


@program()
def intermediate_losses() -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.first(x))
        second = torch.relu(self.second(first))
        return torch.stack([F.cross_entropy(self.head(hidden), y) for hidden in (first, second)]).mean()

    parts = {
        "first": nn.Linear(12, kit.WIDTH),
        "second": nn.Linear(kit.WIDTH, kit.WIDTH),
        "head": nn.Linear(kit.WIDTH, kit.CLASSES),
    }
    return Case(kit.Wrapped(forward, **parts), kit.numbers(), None, kit.unpack)


@program("one-example", "the mean losses of a batch would choose the layer for all of its rows")
def larger_of_two_losses() -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([F.cross_entropy(self.one(x), y), F.cross_entropy(self.two(x), y)]).max()

    return Case(kit.Wrapped(forward, one=kit.mlp(), two=kit.mlp()), kit.numbers(), None, kit.unpack)


@program()
def rdrop_inside() -> Case:
    """R-Drop: two passes of the body with two dropout masks, inside the model."""

    def forward(self: Any, **batch: Any) -> torch.Tensor:
        first, second = self.body(**batch), self.body(**batch)
        return 0.5 * (first.loss + second.loss) + 0.5 * divergence(first.logits, second.logits)

    return Case(kit.Wrapped(forward, body=kit.bert()), kit.labelled(), kit.classify, kit.keywords)


@program()
def rdrop_of_model_losses_in_loop() -> Case:
    """R-Drop: the loop calls a model that returns its loss twice, and adds a term of its logits."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        first, second = model(**batch), model(**batch)
        return 0.5 * (first.loss + second.loss) + 0.5 * divergence(first.logits, second.logits)

    return Case(kit.bert(), kit.labelled(), kit.classify, loss)


def _beside(term: Callable[[Any, Any], torch.Tensor]) -> Case:
    """The model's own loss, halved, and a term of its outputs and the batch."""
    loss = lambda m, b: (lambda found: 0.5 * found.loss + term(found, b))(m(**b, output_hidden_states=True))  # noqa: E731
    return Case(kit.bert(), kit.labelled(), kit.classify, loss)


def _teacher(found: Any, batch: Any) -> Any:
    """A frozen teacher, in the precision of the student's outputs."""
    torch.manual_seed(1)
    teacher = kit.bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).requires_grad_(False)
    return teacher.to(found.logits.dtype)(**batch, output_hidden_states=True)


#: Terms that a loop adds to the loss which a model returns, of its outputs and the batch.
BESIDE: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "distillation": lambda found, b: 2.0 * divergence(found.logits / 2, _teacher(found, b).logits / 2),
    "entropy_bonus": lambda found, b: -0.1 * entropy(found.logits),
    "hidden_states": lambda found, b: F.mse_loss(
        found.hidden_states[-1][:, 0], _teacher(found, b).hidden_states[-1][:, 0]
    ),
    "margins": lambda found, b: F.multi_margin_loss(found.logits, b["labels"]),
}
register_all(BESIDE, _beside, suffix="_beside_model_loss")


def _named_twice(term: bool, body: Any = None) -> Case:
    """A model that returns one tensor under two names beside its loss, as BLIP does, and a loop that may use one of them."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        logits = self.head(hidden.relu())
        return {"loss": F.cross_entropy(logits, y), "states": hidden, "embeds": hidden, "logits": logits}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = model(*batch)
        return found["loss"] + 0.1 * (found["embeds"].square().mean() + entropy(found["logits"])) * term

    parts = {"body": body or nn.Linear(12, kit.WIDTH), "head": nn.Linear(kit.WIDTH, kit.CLASSES)}
    return Case(kit.Wrapped(forward, **parts), kit.numbers(), None, loss)


def _copied() -> nn.Module:
    """A layer that computes with a copy of its matrix."""
    forward = lambda self, x: x @ torch.empty(12, kit.WIDTH).to(x).copy_(self.matrix)  # noqa: E731
    return kit.Wrapped(forward, matrix=nn.Parameter(0.1 * torch.randn(12, kit.WIDTH)))


register_all({"alone": False, "in_a_term": True}, _named_twice, "outputs_named_twice_")
register(
    "outputs_named_twice_slow",
    lambda: _named_twice(True, _copied()),
    "one-example",
    "a copy of the matrix is written in place",
)


@program()
def loss_function_imported_by_name() -> Case:
    """`from torch.nn.functional import cross_entropy`, behind dropout."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(x), y)

    dropout = nn.Sequential(nn.ReLU(), nn.Dropout(0.1))
    return Case(kit.Wrapped(forward, net=kit.mlp(12, kit.CLASSES, *dropout)), kit.numbers(), None, kit.unpack)


@program()
def model_loss_unused() -> Case:
    """Labels are passed to the model, and the loop computes a loss of its own."""
    loss = lambda m, b: F.cross_entropy(m(**b).logits, b["labels"], label_smoothing=0.1)  # noqa: E731
    return Case(kit.bert(), kit.labelled(), kit.classify, loss)


@program()
def divergence_returned_beside_loss() -> Case:
    """A variational autoencoder returns its reconstruction loss and a divergence by its own formula, and the loop adds them."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log = self.encoder(x).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return F.mse_loss(self.decoder(drawn), x), -0.5 * (1 + log - mean**2 - log.exp()).sum(1).mean()

    model = kit.Wrapped(forward, encoder=kit.mlp(outputs=8), decoder=kit.mlp(4, 12))
    return Case(model, kit.numbers(), None, lambda m, b: sum(m(b[0])), exact=False)


@program()
def losses_by_name() -> Case:
    """The model returns a dict of losses, which the loop adds up, as torchvision's detectors do."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(("classes", "value"), self.net(x, y)))

    model = kit.Wrapped(forward, net=TwoHeads(losses=True))
    return Case(model, kit.numbers(), None, lambda m, b: sum(m(*b).values()))


@program("refused: term", "the other rows of a batch are each row's negatives")
def contrast_beside_model_loss() -> Case:
    term = lambda found, b: F.cross_entropy(found.logits @ found.logits.T, torch.arange(len(b["labels"])))  # noqa: E731
    return _beside(term)


def _penalty(model: Any) -> torch.Tensor:
    return 1e-3 * sum((p**2).sum() for p in model.parameters())


register_all(
    {
        "of_model_loss": lambda: Case(kit.bert(), kit.labelled(), kit.classify, penalty=_penalty),
        "of_criterion": lambda: outside(kit.mlp(), kit.numbers(), penalty=_penalty),
        "before_the_pass": lambda: Case(
            kit.bert(), kit.labelled(), kit.classify, lambda m, b: _penalty(m) + m(**b).loss, exact=False
        ),
    },
    lambda build: build(),
    prefix="weight_penalty_",
)


def _distance(model: Any) -> Callable[[Any], torch.Tensor]:
    """L2-SP: how far the weights are from where they began."""
    start = [p.detach().clone() for p in model.parameters()]
    return lambda m: sum((p - q.to(p.device)).pow(2).sum() for p, q in zip(m.parameters(), start))


@program()
def weight_penalty_to_start() -> Case:
    model = kit.mlp()
    return outside(model, kit.numbers(), penalty=_distance(model))


def _scaled(factor: Callable[[Any, torch.Tensor], Any]) -> Case:
    model = kit.mlp()
    distance = _distance(model)

    def loss(m: Any, b: Any) -> torch.Tensor:
        own = kit.crossentropy(m, b)
        return own + factor(b, own) * distance(m)

    return outside(model, kit.numbers(), loss=loss, late=True)


register_all(
    {"by_rows": lambda b, own: 1 / len(b[0]), "by_the_loss": lambda b, own: own.detach()},
    _scaled,
    prefix="weight_penalty_to_start_",
    expect="refused: private.steps_done",
    why="what the factor tells of a batch would reach the weights without noise",
)


def _decayed(run: Any) -> None:
    model, optimizer, loader = run.start()
    for epoch in range(2):
        for batch in loader:
            kit.crossentropy(model, batch).backward()
            if epoch:
                _penalty(model).backward()
            optimizer.step()
            optimizer.zero_grad()


@program("refused: from the first batch", "added to the loss in time, it runs")
def weight_penalty_of_its_own_backward() -> Case:
    """A penalty of weights with a backward pass of its own, from the second epoch on."""
    return Case(kit.mlp(), kit.numbers(), None, loop=_decayed, epochs=2, late=True)


@program()
def weight_penalty_in_a_hook() -> Case:
    """An L1 penalty whose gradient a hook of the optimizer's step adds to the released one."""

    def optimizer(model: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)

        def penalize(*given: Any) -> None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach().sign(), alpha=1e-3)

        made.register_step_pre_hook(penalize)
        return made

    return Case(kit.mlp(), kit.numbers(), None, kit.crossentropy, optimizer=optimizer)


@program()
def rdrop_in_loop() -> Case:
    """R-Drop: the loop calls the model twice, and computes all of its loss."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        first, second = (model(batch["input_ids"], batch["attention_mask"]).logits for _ in range(2))
        wanted = sum(F.cross_entropy(logits, batch["labels"]) for logits in (first, second))
        return 0.5 * wanted + 0.5 * divergence(first, second)

    return Case(kit.bert(), kit.labelled(), kit.classify, loss, options=kit.MEAN)


@program()
def two_views_in_loop() -> Case:
    """The model's own losses of a row's two views, added up."""
    model = kit.Wrapped(lambda self, x, y: F.cross_entropy(self.net(x), y), net=kit.mlp())
    return Case(model, kit.numbers(), None, lambda m, b: 0.5 * (m(b[0], b[1]) + m(b[0].flip(1), b[1])))


def teach(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hinton's distillation at temperature 2."""
    return 0.5 * F.cross_entropy(student, labels) + 2.0 * divergence(student / 2, teacher / 2)


@program()
def distillation_teacher_inside() -> Case:
    def forward(self: Any, labels: torch.Tensor, **batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(**batch).logits
        return teach(self.student(**batch).logits, wanted, labels)

    return Case(
        kit.Wrapped(forward, student=kit.bert(), teacher=kit.bert().requires_grad_(False).eval()),
        kit.labelled(),
        kit.classify,
        kit.keywords,
    )


def encode(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Means of word vectors through a layer."""
    return self.head(self.embed(ids).mean(1))


def embedder(forward: Any) -> Case:
    """Three texts of an example."""
    model = kit.Wrapped(forward, embed=nn.Embedding(96, 8), head=nn.Linear(8, 8))
    ids = torch.randint(0, 96, (3, ROWS, 6), generator=torch.Generator().manual_seed(0))
    return Case(model, TensorDataset(*ids), None, kit.unpack)


@program()
def reward_pairs_in_loop() -> Case:
    """Reward modelling: the loop calls the model for chosen and rejected texts."""
    case = embedder(lambda self, ids: encode(self, ids).sum(1))
    case.loss = lambda model, batch: -F.logsigmoid(model(batch[0]) - model(batch[1])).mean()
    case.options = kit.MEAN
    return case


@program()
def ctc_varying_lengths() -> Case:
    def forward(
        self: Any, x: torch.Tensor, y: torch.Tensor, frames: torch.Tensor, letters: torch.Tensor
    ) -> torch.Tensor:
        scores = self.net(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, frames, letters, zero_infinity=True)

    lengths = 6 + torch.arange(ROWS) % 3, 1 + torch.arange(ROWS) % 3
    rows = TensorDataset(torch.randn(ROWS, 8, 12), torch.randint(1, 5, (ROWS, 3)), *lengths)
    return Case(kit.Wrapped(forward, net=kit.mlp(12, 5)), rows, None, kit.unpack)


@program()
def vector_quantised_code_first() -> Case:
    """VQ-VAE: codes and their commitment, straight through."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        commitment = F.mse_loss(code.detach(), z)
        return F.mse_loss(self.decoder(z + (code - z).detach()), x) + F.mse_loss(code, z.detach()) + 0.25 * commitment

    parts = {"encoder": nn.Linear(12, 4), "decoder": nn.Linear(4, 12), "codes": nn.Embedding(8, 4)}
    return Case(kit.Wrapped(forward, **parts), kit.numbers(), None, kit.unpack)


def _inside(loss: Any) -> Case:
    """A small model that returns the loss of a function of (model, x, y)."""
    return Case(kit.Wrapped(loss, net=kit.mlp(12, kit.CLASSES, nn.Tanh())), kit.numbers(), None, kit.unpack)


def _slope(model: Any, x: torch.Tensor, y: torch.Tensor, kept: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs, and the derivative there of each row's loss."""
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(F.cross_entropy(model.net(x), y, reduction="sum"), x, create_graph=kept)
    return x, found


#: Losses of (model, x, y) that differentiate within the forward pass.
DIFFERENTIATING = {
    "gradient_penalty": lambda m, x, y: F.cross_entropy(m.net(x), y) + _slope(m, x, y, True)[1].pow(2).sum(1).mean(),
    "adversarial_inputs": lambda m, x, y: F.cross_entropy(m.net(x + 0.1 * _slope(m, x, y, False)[1].sign()), y),
}
register_all(
    DIFFERENTIATING, _inside, suffix="_inside", expect="one-example", why="the model differentiates within its forward"
)

#: Losses whose rows are reduced, or come, in other ways.
ORDERS = {
    "mean_over_rows": lambda m, x, y: (m.net(x) - one_hot(y, x)).pow(2).mean(1).mean(0),
    "nanmean_with_gaps": lambda m, x, y: torch.where(
        x[:, :3] > -1, (m.net(x) - one_hot(y, x)) ** 2, torch.nan
    ).nanmean(),
    "dot_with_weights": lambda m, x, y: F.cross_entropy(m.net(x), y, reduction="none").dot(1 + x[:, 0].abs()),
    "einsum_of_all_axes": lambda m, x, y: torch.einsum("bc, bc ->", m.net(x).log_softmax(-1), -one_hot(y, x)),
    "classes_after_rows": lambda m, x, y: (
        F.kl_div(m.net(x).log_softmax(-1), one_hot(y, x), reduction="none").mean(0).sum()
    ),
    "trace_of_scores": lambda m, x, y: -torch.trace(m.net(x).log_softmax(-1) @ one_hot(y, x).T) / len(x),
    "pythons_sum": lambda m, x, y: sum(F.cross_entropy(m.net(x), y, reduction="none")) / len(x),
    "einsum_of_rows": lambda m, x, y: torch.einsum("b->", F.cross_entropy(m.net(x), y, reduction="none")) / len(x),
    "product_with_weights": lambda m, x, y: F.cross_entropy(m.net(x), y, reduction="none") @ (1 + x[:, 0]) / len(x),
    "means_of_stacked_terms": lambda m, x, y: (
        torch.stack([F.cross_entropy(m.net(x), y, reduction="none"), m.net(x).square().sum(1)]).mean(1).sum()
    ),
    "flow": lambda m, x, y: (lambda s: (0.5 * ((x[:, :3] * s.exp()) ** 2 + 1.8).sum(1) - s.sum(1)).mean())(
        m.net(x).tanh()
    ),
    "mean_of_the_only_axis": lambda m, x, y: F.cross_entropy(m.net(x), y, reduction="none").mean(dim=0),
    "pairs_concatenated": lambda m, x, y: (lambda z: -F.logsigmoid(z[0] - z[1]).mean())(
        m.net(torch.cat([x, x.flip(1)])).sum(1).chunk(2)
    ),
}
register_all(ORDERS, _inside)
register(
    "rdrop_concatenated",
    lambda: _inside(lambda m, x, y: F.cross_entropy(m.net(torch.cat([x, x])), torch.cat([y, y]))),
    "one-example",
    "a loss sees the rows twice, one after the other",
)


@program()
def squeezed_outputs_outside() -> Case:
    model = kit.Wrapped(lambda self, x: self.net(x[:, None]).squeeze(), net=kit.mlp(12, 1))
    return outside(model, kit.regression(), loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))


@program()
def squeezed_in_loop() -> Case:
    """squeeze() in the loop, where torch accepts no batch of one row."""
    loss = lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).squeeze(), b[1])  # noqa: E731
    case = outside(kit.mlp(12, 1), kit.regression(), loss=loss, epochs=4, exact=False)
    case.options = {**kit.MEAN, "max_physical_batch_size": 4}
    return case


@program()
def policy_gradient() -> Case:
    """PPO's way: the model returns a distribution over actions and a value."""

    def forward(self: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        hidden = self.net(x).tanh()
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        law, value = model(batch[0])
        ratio, advantage = (law.log_prob(batch[1]) + 1).exp(), batch[0].sum(1) - 6
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return 0.5 * F.mse_loss(value, batch[0].mean(1)) - clipped.mean() - 0.01 * law.entropy().mean()

    heads = {"actor": nn.Linear(kit.WIDTH, kit.CLASSES), "critic": nn.Linear(kit.WIDTH, 1)}
    return outside(kit.Wrapped(forward, net=nn.Linear(12, kit.WIDTH), **heads), kit.numbers(), loss=loss)


@program("one-example", "the model runs each image by itself")
def images_of_several_sizes() -> Case:
    """A tuple of images, some as high as the batch is large, each run by itself."""

    def forward(self: Any, images: Any) -> torch.Tensor:
        return torch.cat([self.head(self.conv(image[None]).relu().amax((2, 3))) for image in images])

    generator = torch.Generator().manual_seed(0)
    sizes = ((3 + n % 6, 8 - n % 5) for n in range(kit.ROWS))
    rows = [(torch.rand(1, high, wide, generator=generator), n % kit.CLASSES) for n, (high, wide) in enumerate(sizes)]
    model = kit.Wrapped(forward, conv=nn.Conv2d(1, 4, 3, padding=1), head=nn.Linear(4, kit.CLASSES))
    collate = lambda items: (tuple(x for x, _ in items), torch.tensor([y for _, y in items]))  # noqa: E731
    return outside(model, rows, collate, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))


def _listed(channels: int, batch_size: int) -> Case:
    """A list of images, as many as channels now and then, each run by itself."""

    def forward(self: Any, images: Any, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.cat([self.head(image.flatten()[None]) for image in images]), labels)

    collate = lambda items: ([x for x, _ in items], torch.tensor([y for _, y in items]))  # noqa: E731
    model = kit.Wrapped(forward, head=nn.Linear(16 * channels, kit.CLASSES))
    return Case(model, kit.images(4, channels), collate, kit.unpack, loader={"batch_size": batch_size}, exact=False)


register_all(
    {"as_many_as_channels": (3, 3), "one_at_a_time": (1, 1)},
    lambda sizes: _listed(*sizes),
    prefix="images_in_lists_",
    expect="one-example",
    why="the model runs each image by itself",
)


@program("refused: outside of its loss", "the loop differentiates a tensor that the model did not return")
def features_of_a_hook() -> Case:
    """A forward hook keeps hidden states, which the loop penalizes."""
    model, kept = kit.mlp(), {}
    model[1].register_forward_hook(lambda module, args, output: kept.update(hidden=output))
    return outside(model, kit.numbers(), loss=lambda m, b: kit.crossentropy(m, b) + kept["hidden"].square().mean())


@program()
def features_of_a_hook_returned() -> Case:
    """The same where a wrapper returns them."""
    net, kept = kit.mlp(), {}
    net[1].register_forward_hook(lambda module, args, output: kept.update(hidden=output))
    model = kit.Wrapped(lambda self, x: (self.net(x), kept["hidden"]), net=net)
    loss = lambda m, b: (lambda z: F.cross_entropy(z[0], b[1]) + z[1].square().mean())(m(b[0]))  # noqa: E731
    return outside(model, kit.numbers(), loss=loss)


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "kl_div_alone_outside": lambda: outside(
        kit.mlp(), kit.numbers(), loss=lambda m, b: (lambda z: divergence(z, 3 * one_hot(b[1], z)))(m(b[0]))
    ),
    "autoencoder_bce_outside": lambda: outside(
        nn.Sequential(kit.mlp(12, 12), nn.Sigmoid()),
        kit.numbers(),
        loss=lambda m, b: F.binary_cross_entropy(m(b[0]), b[0]),
    ),
}
register_all(ONE_LINE, lambda build: build())


def _side_by_side(*tensors: torch.Tensor) -> torch.Tensor:
    """Several rows of each example as a batch: the loop's own `view`."""
    return torch.stack(tensors, 1).flatten(0, 1)


def _preferred(model: Any, batch: Any) -> torch.Tensor:
    """Direct preference optimisation, written out: chosen and rejected texts in one call, summed log-likelihoods."""
    ids = torch.cat([batch["input_ids"], batch["labels"]])
    mask = (ids != 0).long()
    scores = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    found = (scores.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum(-1)
    chosen, rejected = found.split(len(batch["labels"]))
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def _chosen_and_rejected(rows: list[Any]) -> dict[str, torch.Tensor]:
    texts = [row["input_ids"] for row in rows]
    ids = kit.padded([torch.tensor(t) for t in (*texts, *([(w * 7) % 90 + 5 for w in t[:-2]] for t in texts))])
    return {"input_ids": ids[: len(rows)], "labels": ids[len(rows) :]}


def _crops(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    crops = [torch.stack([x[:, i : i + 12, j : j + 12] for i in (0, 4) for j in (0, 4)]) for x, _ in rows]
    return torch.stack(crops), torch.tensor([y for _, y in rows])


def _doubled(model: Any, batch: Any) -> torch.Tensor:
    """R-Drop as published: each batch twice, one after the other."""
    logits = model(torch.cat([batch[0], batch[0]]))
    one, two = logits.chunk(2)
    loss = F.cross_entropy(logits, torch.cat([batch[1], batch[1]]))
    return loss + 0.5 * (divergence(one, two) + divergence(two, one))


#: Loops that make several rows of each example and call the model once: model, rows, collator, loss.
SEVERAL_ROWS: dict[str, tuple[Any, ...]] = {
    "triplets": (
        lambda: kit.mlp(4),
        kit.numbers,
        None,
        lambda m, b: F.triplet_margin_loss(*m(torch.cat([b[0][:, :4], b[0][:, 4:8], b[0][:, 8:]])).chunk(3)),
    ),
    "rdrop": (kit.mlp, kit.numbers, None, _doubled),
    "preferences": (kit.gpt2, kit.id_rows, _chosen_and_rejected, _preferred),
    "rewards": (
        lambda: kit.mlp(12, 1),
        kit.numbers,
        None,
        lambda m, b: -F.logsigmoid(-m(torch.cat([b[0], b[0].flip(1)])).view(2, -1).diff(dim=0)).mean(),
    ),
    "crops": (
        kit.convnet,
        kit.images,
        _crops,
        lambda m, b: F.cross_entropy(m(b[0].flatten(0, 1)).view(len(b[1]), 4, -1).mean(1), b[1]),
    ),
    "interleaved": (
        kit.mlp,
        kit.numbers,
        None,
        lambda m, b: F.cross_entropy(m(_side_by_side(b[0], b[0].flip(1))), b[1].repeat_interleave(2)),
    ),
    "model_losses": (
        kit.bert,
        kit.labelled,
        kit.classify,
        lambda m, b: m(**{name: torch.cat([t, t]) for name, t in b.items()}).loss,
    ),
}
register_all(
    SEVERAL_ROWS,
    lambda parts: Case(
        parts[0](), parts[1](), parts[2], parts[3], options=kit.MEAN if parts[0] is not kit.bert else {}
    ),
    suffix="_concatenated_in_loop",
)
register(
    "noisy_views_in_loop",
    lambda: outside(
        kit.mlp(),
        kit.numbers(),
        loss=lambda m, b: F.cross_entropy(m(torch.cat([b[0], b[0] + 0.1 * torch.randn_like(b[0])])), b[1].repeat(2)),
        exact=False,
    ),
)
