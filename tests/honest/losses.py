"""Losses: several terms, weights, distances, and terms of one's own, inside the model or in the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from .custom import attention, id_collate, outside, text_case, text_model
from .harness import ROWS, Case, program, register
from .kit import (
    CLASSES,
    MEAN,
    WIDTH,
    Wrapped,
    bert,
    causal,
    classify,
    gpt2,
    id_rows,
    keywords,
    labelled,
    mlp,
    numbers,
    unpack,
)

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
    return F.one_hot(labels, CLASSES).to(like)


#: Losses of (logits, labels).
CLASSIFYING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "label_smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "negative_log_likelihood": lambda z, y: F.nll_loss(z.log_softmax(-1), y),
    "focal": focal,
    "multi_margin": lambda z, y: F.multi_margin_loss(z, y),
    "binary_with_positive_weight": lambda z, y: F.binary_cross_entropy_with_logits(
        z, one_hot(y, z), pos_weight=torch.tensor(WEIGHTS).to(z)
    ),
    "binary_of_sigmoid": lambda z, y: F.binary_cross_entropy(z.sigmoid(), one_hot(y, z)),
    "kl_div_alone": lambda z, y: divergence(z, 3 * one_hot(y, z)),
    "smooth_l1": lambda z, y: F.smooth_l1_loss(z, one_hot(y, z)),
    "huber_plus_mse": lambda z, y: F.huber_loss(z, one_hot(y, z)) + 0.5 * F.mse_loss(z.sigmoid(), one_hot(y, z)),
    "cosine_embedding": lambda z, y: F.cosine_embedding_loss(z, one_hot(y, z), torch.ones(len(z))),
    "entropy_bonus": lambda z, y: F.cross_entropy(z, y) - 0.1 * entropy(z),
    "kl_to_uniform": lambda z, y: F.cross_entropy(z, y) + 0.5 * divergence(z, torch.zeros_like(z)),
    "activation_penalty": lambda z, y: F.cross_entropy(z, y) + 0.01 * z.pow(2).mean(),
    "none_then_mean": lambda z, y: F.cross_entropy(z, y, reduction="none").mean(),
    "none_then_sum_over_rows": lambda z, y: F.cross_entropy(z, y, reduction="none").sum() / len(z),
    "mean_absolute_error_by_hand": lambda z, y: (z.sigmoid() - one_hot(y, z)).abs().mean(),
    "squared_error_by_hand": lambda z, y: ((z - one_hot(y, z)) ** 2).mean(),
    "log_cosh_by_hand": lambda z, y: torch.log(torch.cosh(z - one_hot(y, z))).mean(),
    "generalised_cross_entropy": lambda z, y: ((1 - z.softmax(-1).gather(1, y[:, None]) ** 0.7) / 0.7).mean(),
    "dice_by_row": lambda z, y: (
        1 - 2 * (z.sigmoid() * one_hot(y, z)).sum(1) / (z.sigmoid() + one_hot(y, z)).sum(1)
    ).mean(),
    "logsigmoid_reward": lambda z, y: -F.logsigmoid(z[:, 0] - z[:, 1]).mean(),
}
for _name, _loss in CLASSIFYING.items():
    register(
        f"{_name}_inside",
        lambda f=_loss: text_case(lambda self, ids, mask, labels: f(attention(self, ids, mask), labels)),
    )
for _name in ("label_smoothing", "focal", "binary_of_sigmoid", "entropy_bonus", "kl_div_alone", "logsigmoid_reward"):
    register(
        f"{_name}_outside",
        lambda f=CLASSIFYING[_name]: outside(mlp(), numbers(), loss=lambda m, b: f(m(b[0]), b[1])),
    )


@program()
def class_weights_criterion() -> Case:
    """Class weights by the documented way: a criterion of one loss a row."""

    def criterion(output: Any, batch: Any) -> torch.Tensor:
        weights = torch.tensor(WEIGHTS).to(output.logits)
        return F.cross_entropy(output.logits, batch["labels"], weight=weights, reduction="none")

    return Case(bert(), labelled(), classify, lambda m, b: m(b["input_ids"], b["attention_mask"]), criterion)


@program("refused: weight", "torch divides by the weights of the whole batch")
def class_weights_mean_outside() -> Case:
    """CrossEntropyLoss(weight=...) in the loop."""
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=torch.tensor(WEIGHTS))  # noqa: E731
    return outside(mlp(), numbers(), loss=loss)


@program("one-example or refused: weight", "torch divides by the weights of the whole batch")
def class_weights_mean_inside() -> Case:
    """CrossEntropyLoss(weight=...) in the model."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(attention(self, ids, mask), labels, weight=torch.tensor(WEIGHTS))

    case = text_case(forward)
    case.exact = False
    return case


@program()
def row_weights_inside() -> Case:
    """Weights of rows from the batch times losses of rows."""

    def forward(self: Any, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (weight * F.cross_entropy(self.net(x), y, reduction="none")).mean()

    x, y = numbers().tensors
    return Case(Wrapped(forward, net=mlp()), TensorDataset(x, torch.linspace(0.5, 2, ROWS), y), None, unpack)


@program()
def token_means_criterion() -> Case:
    """Mean over each row's own tokens, as a criterion."""

    def criterion(output: Any, batch: Any) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)

    return Case(
        gpt2(), id_rows(), causal, lambda m, b: m(b["input_ids"], attention_mask=b["attention_mask"]), criterion
    )


@program()
def token_means_outside() -> Case:
    """The same, its mean computed in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
        return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()

    return Case(gpt2(), id_rows(), causal, loss, options=MEAN)


@program()
def token_mean_outside_one_length() -> Case:
    """One mean over all tokens in the loop, rows of one length."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return Case(gpt2(), id_rows(low=9, high=9), causal, loss, options=MEAN)


@program()
def two_heads() -> Case:
    """Classification and regression from one body."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.body(x))
        value = self.value(hidden).squeeze(-1)
        return 0.5 * F.cross_entropy(self.classes(hidden), y) + F.mse_loss(value, y.to(value))

    model = Wrapped(forward, body=nn.Linear(12, WIDTH), value=nn.Linear(WIDTH, 1), classes=nn.Linear(WIDTH, CLASSES))
    return Case(model, numbers(), None, unpack)


@program()
def two_heads_outside() -> Case:
    """The same with both losses in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        classes, value = model(batch[0])
        return F.cross_entropy(classes, batch[1]) + 0.3 * F.l1_loss(value.squeeze(-1), batch[1].to(value))

    model = Wrapped(lambda self, x: (self.classes(x), self.value(x)), classes=mlp(), value=mlp(outputs=1))
    return outside(model, numbers(), loss=loss)


@program("one-example", "parameters multiply means of losses")
def learned_loss_weights() -> Case:
    """Two losses weighed by learned uncertainties (Kendall)."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = self.value(x).squeeze(-1)
        first, second = F.cross_entropy(self.classes(x), y), F.mse_loss(value, y.to(value))
        return torch.exp(-self.s[0]) * first + torch.exp(-self.s[1]) * second + self.s.sum()

    model = Wrapped(forward, classes=mlp(), value=mlp(outputs=1), s=nn.Parameter(torch.zeros(2)))
    return Case(model, numbers(), None, unpack)


@program("uses or refused: parameter", "a penalty of parameters is no loss of an example; weight_decay is the same")
def parameter_penalty() -> Case:
    """The loop adds squared parameters to the loss."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(**batch).loss + 1e-4 * sum(p.pow(2).sum() for p in model.parameters())

    return Case(bert(), labelled(), classify, loss)


@program()
def scaled_loss() -> Case:
    """The loop multiplies the returned loss, which has no effect."""
    return Case(bert(), labelled(), classify, lambda m, b: 0.5 * m(**b).loss, exact=False)


@program()
def intermediate_losses() -> Case:
    """Deep supervision: the mean of losses of two layers."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.first(x))
        second = torch.relu(self.second(first))
        return torch.stack([F.cross_entropy(self.head(hidden), y) for hidden in (first, second)]).mean()

    parts = {"first": nn.Linear(12, WIDTH), "second": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, CLASSES)}
    return Case(Wrapped(forward, **parts), numbers(), None, unpack)


@program()
def rdrop_inside() -> Case:
    """R-Drop: two passes of the body with two dropout masks, inside the model."""

    def forward(self: Any, **batch: Any) -> torch.Tensor:
        first, second = self.body(**batch), self.body(**batch)
        return 0.5 * (first.loss + second.loss) + 0.5 * divergence(first.logits, second.logits)

    return Case(Wrapped(forward, body=bert()), labelled(), classify, keywords)


@program("uses or refused: two forward", "two forward passes of one batch")
def rdrop_in_loop() -> Case:
    """R-Drop: the loop calls the model twice."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        first, second = model(**batch), model(**batch)
        return 0.5 * (first.loss + second.loss) + 0.5 * divergence(first.logits, second.logits)

    return Case(bert(), labelled(), classify, loss)


@program("one-example", "the model repeats the rows")
def rdrop_repeated_rows() -> Case:
    """R-Drop by repeating the rows inside the model."""

    def forward(self: Any, labels: torch.Tensor, **batch: Any) -> torch.Tensor:
        first, second = self.body(**{k: torch.cat([v, v]) for k, v in batch.items()}).logits.chunk(2)
        return F.cross_entropy(first, labels) + F.cross_entropy(second, labels) + divergence(first, second)

    return Case(Wrapped(forward, body=bert()), labelled(), classify, keywords)


def teach(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Hinton's distillation at temperature 2."""
    return 0.5 * F.cross_entropy(student, labels) + 2.0 * divergence(student / 2, teacher / 2)


@program()
def distillation_teacher_inside() -> Case:
    """A frozen teacher is part of the module."""

    def forward(self: Any, labels: torch.Tensor, **batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(**batch).logits
        return teach(self.student(**batch).logits, wanted, labels)

    return Case(
        Wrapped(forward, student=bert(), teacher=bert().requires_grad_(False).eval()), labelled(), classify, keywords
    )


@program()
def distillation_teacher_in_loop() -> Case:
    """The loop asks a frozen teacher, and computes both terms."""
    teacher = mlp().requires_grad_(False)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher.to(batch[0])(batch[0])
        return teach(model(batch[0]), wanted, batch[1])

    return outside(mlp(), numbers(), loss=loss)


@program("one-example or refused: criterion", "the loop adds a term to the model's own loss")
def distillation_student_loss() -> Case:
    """The student returns its loss; the loop adds a term of the logits."""
    teacher = bert().requires_grad_(False).eval()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        output = model(**batch)
        with torch.no_grad():
            wanted = teacher(**batch).logits
        return 0.5 * output.loss + 0.5 * divergence(output.logits, wanted)

    return Case(bert(), labelled(), classify, loss, exact=False)


def encode(self: Any, ids: torch.Tensor) -> torch.Tensor:
    """Means of word vectors through a layer."""
    return self.head(self.embed(ids).mean(1))


def embedder(forward: Any) -> Case:
    """Three texts of an example."""
    model = Wrapped(forward, embed=nn.Embedding(96, 8), head=nn.Linear(8, 8))
    ids = torch.randint(0, 96, (3, ROWS, 6), generator=torch.Generator().manual_seed(0))
    return Case(model, TensorDataset(*ids), None, unpack)


@program()
def triplet() -> Case:
    """Anchor, positive and negative of one example."""
    return embedder(lambda self, a, p, n: F.triplet_margin_loss(*(encode(self, x) for x in (a, p, n))))


@program()
def triplet_by_hand() -> Case:
    """The same with distances and relu."""

    def forward(self: Any, *ids: torch.Tensor) -> torch.Tensor:
        a, p, n = (encode(self, x) for x in ids)
        return F.relu((a - p).norm(dim=1) - (a - n).norm(dim=1) + 1.0).mean()

    return embedder(forward)


@program()
def cosine_similarity_of_pairs() -> Case:
    """Similarity of two texts against a score."""

    def forward(self: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        similarity = F.cosine_similarity(encode(self, a), encode(self, b))
        return F.mse_loss(similarity, c[:, 0].to(similarity) / 96)

    return embedder(forward)


@program()
def margin_ranking() -> Case:
    """Margin ranking of two texts of one example."""

    def forward(self: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        first, second = (encode(self, x).sum(1) for x in (a, b))
        return F.margin_ranking_loss(first, second, torch.ones_like(first), margin=0.5)

    return embedder(forward)


@program()
def reward_pairs_inside() -> Case:
    """Reward modelling: two calls of the body inside the model."""

    def forward(self: Any, chosen: torch.Tensor, rejected: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        return -F.logsigmoid(encode(self, chosen).sum(1) - encode(self, rejected).sum(1)).mean()

    return embedder(forward)


@program("uses or refused: two forward", "two forward passes before one backward pass")
def reward_pairs_in_loop() -> Case:
    """Reward modelling: the loop calls the model for chosen and rejected texts."""
    case = embedder(lambda self, ids: encode(self, ids).sum(1))
    case.loss = lambda model, batch: -F.logsigmoid(model(batch[0]) - model(batch[1])).mean()
    case.options = MEAN
    return case


@program()
def ctc() -> Case:
    """CTC over frames of one length, targets of one length."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames = self.net(x).log_softmax(-1).transpose(0, 1)
        sizes = [torch.full((len(x),), n, dtype=torch.long) for n in (8, 3)]
        return F.ctc_loss(frames, y, *sizes)

    rows = TensorDataset(torch.randn(ROWS, 8, 12), torch.randint(1, 5, (ROWS, 3)))
    return Case(Wrapped(forward, net=mlp(12, 5)), rows, None, unpack)


@program()
def ctc_varying_lengths() -> Case:
    """CTC with lengths of each row."""

    def forward(
        self: Any, x: torch.Tensor, y: torch.Tensor, frames: torch.Tensor, letters: torch.Tensor
    ) -> torch.Tensor:
        scores = self.net(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(scores, y, frames, letters, zero_infinity=True)

    lengths = 6 + torch.arange(ROWS) % 3, 1 + torch.arange(ROWS) % 3
    rows = TensorDataset(torch.randn(ROWS, 8, 12), torch.randint(1, 5, (ROWS, 3)), *lengths)
    return Case(Wrapped(forward, net=mlp(12, 5)), rows, None, unpack)


@program()
def autoencoder_bce_outside() -> Case:
    """F.binary_cross_entropy(reconstruction, x) in the loop."""
    net = nn.Sequential(mlp(12, 12), nn.Sigmoid())
    return outside(net, numbers(), loss=lambda m, b: F.binary_cross_entropy(m(b[0]), b[0]))


@program()
def sparse_autoencoder() -> Case:
    """Reconstruction with an L1 penalty on the code, in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        code = torch.relu(model.encoder(batch[0]))
        return F.mse_loss(model.decoder(code), batch[0]) + 0.01 * code.abs().sum(1).mean()

    model = Wrapped(lambda self, x: self.decoder(torch.relu(self.encoder(x))))
    model.encoder, model.decoder = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 12)

    def inside(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(self, (x, y))

    model.function = inside
    return Case(model, numbers(), None, unpack)


def _vector_quantised(commitment_first: bool) -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.encoder(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(-1))
        commitment = F.mse_loss(z, code.detach()) if commitment_first else F.mse_loss(code.detach(), z)
        return F.mse_loss(self.decoder(z + (code - z).detach()), x) + F.mse_loss(code, z.detach()) + 0.25 * commitment

    parts = {"encoder": nn.Linear(12, 4), "decoder": nn.Linear(4, 12), "codes": nn.Embedding(8, 4)}
    return Case(Wrapped(forward, **parts), numbers(), None, unpack)


for _first in (False, True):
    register(f"vector_quantised_{'input' if _first else 'code'}_first", lambda first=_first: _vector_quantised(first))


@program()
def annealed_weight_attribute() -> Case:
    """The loop sets model.beta before each step."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = attention(self, ids, mask)
        return F.cross_entropy(logits, labels) + self.beta * logits.pow(2).mean()

    case, step = text_case(forward, beta=0.0), [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        step[0] += 1
        model.beta = step[0] / 30
        return model(**batch)

    case.loss, case.exact = loss, False
    return case


@program()
def temperature_argument() -> Case:
    """The loop passes a temperature that falls with the step."""

    def forward(self: Any, temperature: float, **batch: Any) -> torch.Tensor:
        return F.cross_entropy(attention(self, batch["ids"], batch["mask"]) / temperature, batch["labels"])

    step = [0]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        step[0] += 1
        return model(temperature=max(0.5, 1 - step[0] / 30), **batch)

    return Case(text_model(forward), labelled(), id_collate, loss, exact=False)
