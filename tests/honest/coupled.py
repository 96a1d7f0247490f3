"""Programs whose examples do affect each other, or whose state does: refused, or freed of the coupling on the slow route."""

from __future__ import annotations

import copy
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations

from . import kit
from .custom import outside
from .harness import BATCH, ROWS, Case, program, register, register_all
from .losses import embedder, encode
from .stock import build

#: What a sentence about coupled examples says.
COUPLED = "refused: couples or refused: alone or refused: batch or refused: beside"


def coupled(function: Any, expect: str = COUPLED, why: str = "", **parts: Any) -> Case:
    """A small model that returns the loss of a function of (model, x, y)."""
    return Case(kit.Wrapped(function, **{"net": kit.mlp(), **parts}), kit.numbers(), None, kit.unpack, exact=False)


NORMS = {
    "2d": lambda: outside(kit.convnet(nn.BatchNorm2d), kit.images()),
    "1d": lambda: outside(kit.mlp(12, 3, nn.BatchNorm1d(16)), kit.numbers()),
}
register_all(NORMS, lambda build: build(), "batch_norm_", "", "refused: batch", "statistics of the batch")


@program("refused: batch", "statistics of the batch")
def resnet_of_transformers() -> Case:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=kit.CLASSES)
    return Case(hf.ResNetForImageClassification(config), kit.images(32), kit.pictures)


@program("refused: batch", "statistics of the batch, by function")
def functional_batch_norm() -> Case:
    return coupled(lambda self, x, y: F.cross_entropy(self.net(F.batch_norm(x, None, None, training=True)), y))


@program("refused: statistics or refused: buffer", "running statistics of the data are kept")
def instance_norm_running_statistics() -> Case:
    return outside(kit.convnet(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)), kit.images())


def _standardise(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


#: Losses of (model, x, y) that run over the batch.
LOSSES = {
    "contrastive": lambda m, x, y: F.cross_entropy(m.net(x) @ m.net(x + 0.1).T, torch.arange(len(x))),
    "supervised_contrastive": lambda m, x, y: (
        -((m.net(x) @ m.net(x).T).log_softmax(1) * (y[:, None] == y)).sum(1).mean()
    ),
    "batch_standardised": lambda m, x, y: F.cross_entropy(m.net(_standardise(x)), y),
    "softmax_over_rows": lambda m, x, y: F.cross_entropy(m.net(x).softmax(0), y),
    "pairwise_ranking": lambda m, x, y: F.softplus(m.net(x)[:, 0] - m.net(x)[:, 0].roll(1)).mean(),
    "hardest_negative": lambda m, x, y: F.relu(1 - torch.cdist(m.net(x), m.net(x)).max(1).values).mean(),
    "balancing_term": lambda m, x, y: F.cross_entropy(m.net(x), y) + m.net(x).softmax(-1).mean(0).pow(2).sum(),
    "decorrelation": lambda m, x, y: (_standardise(m.net(x)).T @ _standardise(m.net(x)) / len(x)).triu(1).pow(2).sum(),
    "variance_term": lambda m, x, y: F.cross_entropy(m.net(x), y) + F.relu(1 - m.net(x).std(0)).mean(),
    "mixup_inside": lambda m, x, y: F.cross_entropy(m.net(0.7 * x + 0.3 * x.roll(1, 0)), y),
    "worst_row": lambda m, x, y: F.cross_entropy(m.net(x), y, reduction="none").max(),
    "attention_over_rows": lambda m, x, y: F.cross_entropy(m.net((x @ x.T).softmax(1) @ x), y),
}
#: Of these no row has a loss of its own; alone, a row is its own companion.
WHOLE = ("pairwise_ranking", "hardest_negative", "decorrelation", "worst_row")
for _name, _loss in LOSSES.items():
    _expect = f"one-example or {COUPLED}" if _name in WHOLE else COUPLED
    register(_name, lambda f=_loss: coupled(f), _expect, "the loss of a row depends on other rows")


def _of_class(model: Any, batch: Any) -> torch.Tensor:
    losses, chosen = F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch[1] == 0
    return losses.mean() + 0.3 * (losses * chosen).sum() / chosen.sum().clamp(min=1)


@program(COUPLED, "a row of one class counts by how many the batch has")
def mean_over_one_class_in_loop() -> Case:
    return outside(kit.mlp(), kit.numbers(), loss=_of_class, late=True)


@program("one-example or " + COUPLED, "a row of one class counts by how many the batch has")
def mean_over_one_class_inside() -> Case:
    return coupled(lambda self, x, y: _of_class(self.net, (x, y)))


@program(COUPLED, "similarities between rows")
def clip_model() -> Case:
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = hf.CLIPTextConfig(
        **tower, vocab_size=96, max_position_embeddings=16, pad_token_id=0, bos_token_id=2, eos_token_id=3
    )
    vision = hf.CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    rows = [
        {"input_ids": torch.tensor([*r["input_ids"][:5], 3]), "pixel_values": x}
        for r, (x, _) in zip(kit.id_rows(low=6), kit.images())
    ]
    return Case(model, rows, None, lambda m, b: m(**b, return_loss=True).loss)


@program(COUPLED, "other rows are the negatives")
def in_batch_negatives() -> Case:
    return embedder(lambda self, a, p, n: F.cross_entropy(encode(self, a) @ encode(self, p).T, torch.arange(len(a))))


@program("one-example or " + COUPLED, "a term of the router runs over all tokens of the batch")
def router_auxiliary_loss() -> Case:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return Case(build("Mixtral", "ForCausalLM", **experts), kit.id_rows(), kit.causal, exact=False)


def _queue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    query, key = self.net(x), self.net(x + 0.1).detach()
    loss = F.cross_entropy(torch.cat([(query * key).sum(1, True), query @ self.kept.T], 1), torch.zeros_like(y))
    self.kept = torch.cat([key, self.kept])[:8]
    return loss


def _running_mean(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.kept.mul_(0.9).add_(0.1 * x.mean(0))
    return F.cross_entropy(self.net(x - self.kept), y)


STATE = "refused: buffer or refused: state or " + COUPLED


def _stateful(made: tuple[Any, tuple[int, ...]]) -> Case:
    case = coupled(made[0])
    case.model.register_buffer("kept", torch.zeros(made[1]))
    return case


STATEFUL = {"memory_queue": (_queue, (8, kit.CLASSES)), "running_mean": (_running_mean, (12,))}
register_all(STATEFUL, _stateful, expect=STATE, why="a buffer carries rows of earlier batches")


@program(STATE, "an attribute carries rows of earlier batches")
def running_mean_attribute() -> Case:
    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        return F.cross_entropy(self.net(x - self.kept), y)

    return coupled(forward, kept=torch.zeros(12))


@program(COUPLED, "a queue of the loop has rows of earlier batches as negatives")
def memory_queue_in_loop() -> Case:
    """MoCo with a queue of one batch: keys of a slow copy of the model."""
    model, kept = kit.mlp(), F.normalize(torch.randn(BATCH, kit.CLASSES))
    slow, place = copy.deepcopy(model).requires_grad_(False), count()

    def loss(model: Any, batch: Any) -> torch.Tensor:
        query = F.normalize(model(batch[0]))
        with torch.no_grad():
            for mean, parameter in zip(slow.parameters(), model.parameters()):
                mean.lerp_(parameter, 0.01)
            keys = F.normalize(slow(batch[0].flip(1)))
        logits = torch.cat([(query * keys).sum(1, True), query @ kept.clone().T], 1)
        for key in keys:
            kept[next(place) % BATCH] = key
        return F.cross_entropy(logits / 0.2, torch.zeros(len(query), dtype=torch.long))

    return outside(model, kit.numbers(), loss=loss, exact=False)


@program("one-example or refused: buffer", "a buffer follows the weight, by power iteration in forward")
def spectral_norm() -> Case:
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, kit.CLASSES))
    return outside(net, kit.numbers(), exact=False)


PADDING = "one-example or refused: pad"


def left(rows: list[Any], **options: Any) -> Case:
    """GPT-2 padded on the left without position_ids."""
    return Case(kit.gpt2(**options), rows, partial(kit.causal, left=True), late=True)


@program(PADDING, "padding on the left moves absolute positions")
def left_padding() -> Case:
    return left(kit.id_rows())


@program(PADDING, "padding on the left moves absolute positions")
def left_padding_one_long() -> Case:
    return left([*kit.id_rows(ROWS - 1, 6, 6), *kit.id_rows(1, 40, 40)])


@program(PADDING, "a token of padding predicts the first token")
def left_padding_relative() -> Case:
    """Llama padded on the left: positions are relative, but padding predicts each row's first token."""
    return Case(build("Llama", "ForCausalLM"), kit.id_rows(), partial(kit.causal, left=True))


@program(PADDING, "attention sees padding")
def encoder_without_mask() -> Case:
    return Case(
        kit.bert(), kit.labelled(), lambda rows: {k: v for k, v in kit.classify(rows).items() if k != "attention_mask"}
    )


TOKENS = "refused: token or " + COUPLED


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    """One mean over the tokens of all rows."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


@program(TOKENS, "a row's share of a mean over tokens depends on the other rows' lengths")
def token_mean_in_loop() -> Case:
    """nanoGPT's loss in the loop over rows of varying length."""
    return Case(kit.gpt2(), kit.id_rows(), kit.causal, token_mean, options=kit.MEAN)


@program("refused: one loss or " + TOKENS, "a criterion must give one loss a row")
def token_mean_criterion() -> Case:
    def criterion(output: Any, batch: Any) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum() * len(labels)

    return Case(kit.gpt2(), kit.id_rows(), kit.causal, lambda m, b: m(b["input_ids"]), criterion)


@program("refused: loop or " + COUPLED, "rows are mixed")
def mixup_in_loop() -> Case:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        other = torch.randperm(len(batch[0]))
        output = model(0.7 * batch[0] + 0.3 * batch[0][other])
        return 0.7 * F.cross_entropy(output, batch[1]) + 0.3 * F.cross_entropy(output, batch[1][other])

    return outside(kit.mlp(), kit.numbers(), loss=loss)


@program("refused: loop or " + COUPLED, "every row sees the mean of the batch")
def standardised_in_loop() -> Case:
    return outside(kit.mlp(), kit.numbers(), loss=lambda m, b: F.cross_entropy(m(_standardise(b[0])), b[1]))


def _contrasted(model: Any, batch: Any) -> torch.Tensor:
    """SimCLR: two views of each example in one call, all others are negatives."""
    z = F.normalize(model(torch.cat([batch[0], batch[0].flip(1)])), dim=-1)
    rows = torch.arange(len(z))
    return F.cross_entropy((z @ z.T - 1e4 * torch.eye(len(z))) / 0.5, rows.roll(len(batch[0])))


def _rolled(model: Any, batch: Any) -> torch.Tensor:
    """The next example of the batch as the negative of each."""
    views = torch.cat([batch[0], batch[0].flip(1), batch[0].roll(1, 0)])
    return F.triplet_margin_loss(*model(views).chunk(3))


CONCATENATED = {"views_contrasted_in_loop": _contrasted, "negatives_rolled_in_loop": _rolled}
register_all(
    CONCATENATED,
    lambda loss: outside(kit.mlp(), kit.numbers(), loss=loss),
    expect="refused: loop or " + COUPLED,
    why="the loss of a row depends on other rows",
)


@program(COUPLED, "the mean activation of the batch is every row's")
def sparse_autoencoder() -> Case:
    """A small penalty on the mean activation of each hidden unit."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found, hidden = model(batch[0])
        rate = hidden.mean(0)
        penalty = 0.05 * (0.05 / rate).log() + 0.95 * (0.95 / (1 - rate)).log()
        return F.mse_loss(found, batch[0]) + 0.1 * penalty.sum()

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(x).sigmoid()
        return self.decoder(hidden), hidden

    model = kit.Wrapped(forward, encoder=nn.Linear(12, kit.WIDTH), decoder=nn.Linear(kit.WIDTH, 12))
    return outside(model, kit.numbers(), loss=loss)


@program("refused: collator or " + COUPLED, "rows are mixed")
def mixup_in_collator() -> Case:
    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [0.7 * x + 0.3 * x.roll(1, 0), y]

    return outside(kit.mlp(), kit.numbers(), collate)


@program("refused: pack or refused: unit_map or refused: collator", "several examples share a row without a map")
def packed_without_map() -> Case:
    rows = [{"input_ids": row["input_ids"]} for row in kit.id_rows()]
    return Case(build("Llama", "ForCausalLM"), rows, hf.DataCollatorWithFlattening())


@program("refused: expert or " + COUPLED, "an expert takes so many tokens of the whole batch")
def expert_capacity() -> Case:
    """A mixture whose experts drop tokens beyond their capacity."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(1)
        place = F.one_hot(chosen, 2).cumsum(0).gather(1, chosen[:, None])
        kept = (place <= max(1, len(x) // 4)).to(x)
        hidden = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), chosen]
        return F.cross_entropy(self.net(x + kept * hidden), y)

    case = coupled(forward)
    case.model.router, case.model.experts = nn.Linear(12, 2), nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
    return case
