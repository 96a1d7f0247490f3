"""Programs whose examples do affect each other, or whose state does: refused, or freed of the coupling on the slow route."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

from .custom import outside, text_case
from .harness import ROWS, Case, program, register
from .kit import (
    CLASSES,
    MEAN,
    Wrapped,
    bert,
    causal,
    classify,
    convnet,
    gpt2,
    id_rows,
    images,
    labelled,
    mlp,
    numbers,
    pictures,
    unpack,
)
from .losses import embedder, encode
from .stock import build

#: What a sentence about coupled examples says.
COUPLED = "refused: couples or refused: alone or refused: batch"


def coupled(function: Any, expect: str = COUPLED, why: str = "", **parts: Any) -> Case:
    """A small model that returns the loss of a function of (model, x, y)."""
    return Case(Wrapped(function, **{"net": mlp(), **parts}), numbers(), None, unpack)


NORMS = {
    "2d": lambda: outside(convnet(nn.BatchNorm2d), images()),
    "1d": lambda: outside(mlp(12, 3, nn.BatchNorm1d(16)), numbers()),
}
for _name, _case in NORMS.items():
    register(f"batch_norm_{_name}", _case, "refused: BatchNorm", "statistics of the batch")


@program("refused: BatchNorm", "statistics of the batch")
def batch_norm_inside() -> Case:
    """A network with BatchNorm that returns its loss."""
    return Case(
        Wrapped(lambda self, x, y: F.cross_entropy(self.net(x), y), net=convnet(nn.BatchNorm2d)), images(), None, unpack
    )


@program("refused: BatchNorm", "statistics of the batch")
def resnet_of_transformers() -> Case:
    """A stock ResNet."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=CLASSES)
    return Case(hf.ResNetForImageClassification(config), images(32), pictures)


@program("refused: batch", "statistics of the batch, by function")
def functional_batch_norm() -> Case:
    """F.batch_norm inside forward."""
    return coupled(lambda self, x, y: F.cross_entropy(self.net(F.batch_norm(x, None, None, training=True)), y))


@program("refused: statistics or refused: buffer", "running statistics of the data are kept")
def instance_norm_running_statistics() -> Case:
    """InstanceNorm2d(track_running_stats=True)."""
    return outside(convnet(lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True)), images())


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


@program(COUPLED, "similarities between rows")
def clip_model() -> Case:
    """CLIP's contrastive loss."""
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = hf.CLIPTextConfig(
        **tower, vocab_size=96, max_position_embeddings=16, pad_token_id=0, bos_token_id=2, eos_token_id=3
    )
    vision = hf.CLIPVisionConfig(**tower, image_size=16, patch_size=8)
    model = hf.CLIPModel(hf.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8))
    rows = [
        {"input_ids": torch.tensor([*r["input_ids"][:5], 3]), "pixel_values": x}
        for r, (x, _) in zip(id_rows(low=6), images())
    ]
    return Case(model, rows, None, lambda m, b: m(**b, return_loss=True).loss)


@program(COUPLED, "other rows are the negatives")
def in_batch_negatives() -> Case:
    """MultipleNegativesRankingLoss."""
    return embedder(lambda self, a, p, n: F.cross_entropy(encode(self, a) @ encode(self, p).T, torch.arange(len(a))))


@program("one-example or " + COUPLED, "a term of the router runs over all tokens of the batch")
def router_auxiliary_loss() -> Case:
    """Mixtral with output_router_logits=True."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return Case(build("Mixtral", "ForCausalLM", **experts), id_rows(), causal, exact=False)


def _queue(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    query, key = self.net(x), self.net(x + 0.1).detach()
    loss = F.cross_entropy(torch.cat([(query * key).sum(1, True), query @ self.kept.T], 1), torch.zeros_like(y))
    self.kept = torch.cat([key, self.kept])[:8]
    return loss


def _running_mean(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    self.kept.mul_(0.9).add_(0.1 * x.mean(0))
    return F.cross_entropy(self.net(x - self.kept), y)


STATE = "refused: buffer or refused: state or " + COUPLED
for _name, _forward, _shape in (("memory_queue", _queue, (8, CLASSES)), ("running_mean", _running_mean, (12,))):

    def _stateful(forward: Any = _forward, shape: tuple[int, ...] = _shape) -> Case:
        case = coupled(forward)
        case.model.register_buffer("kept", torch.zeros(shape))
        return case

    register(_name, _stateful, STATE, "a buffer carries rows of earlier batches")


@program(STATE, "an attribute carries rows of earlier batches")
def running_mean_attribute() -> Case:
    """A running mean that is a plain attribute."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        return F.cross_entropy(self.net(x - self.kept), y)

    return coupled(forward, kept=torch.zeros(12))


@program(STATE, "codes follow a running mean of the rows")
def codebook_by_averages() -> Case:
    """VQ-VAE whose codebook is an exponential average."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        chosen = torch.cdist(z, self.codes).argmin(1)
        with torch.no_grad():
            hits = F.one_hot(chosen, 4).to(z)
            self.codes.lerp_(hits.T @ z / hits.sum(0).clamp(min=1)[:, None], 0.1)
        return F.mse_loss(z, self.codes[chosen].detach())

    case = coupled(forward)
    case.model.register_buffer("codes", torch.randn(4, CLASSES))
    return case


@program("one-example or refused: buffer", "a buffer follows the weight, by power iteration in forward")
def spectral_norm() -> Case:
    """spectral_norm on a layer."""
    net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, CLASSES))
    return outside(net, numbers(), exact=False)


PADDING = "one-example or refused: pad"


def left(rows: list[Any], **options: Any) -> Case:
    """GPT-2 padded on the left without position_ids."""
    return Case(gpt2(**options), rows, partial(causal, left=True))


@program(PADDING, "padding on the left moves absolute positions")
def left_padding() -> Case:
    """Rows of varying length."""
    return left(id_rows())


@program(PADDING, "padding on the left moves absolute positions")
def left_padding_one_long() -> Case:
    """One record is far longer than the others."""
    return left([*id_rows(ROWS - 1, 6, 6), *id_rows(1, 40, 40)])


@program(PADDING, "a token of padding predicts the first token")
def left_padding_relative() -> Case:
    """Llama padded on the left: positions are relative, but padding predicts each row's first token."""
    return Case(build("Llama", "ForCausalLM"), id_rows(), partial(causal, left=True))


@program(PADDING, "attention sees padding")
def encoder_without_mask() -> Case:
    """BERT without an attention mask on padded rows."""
    return Case(bert(), labelled(), lambda rows: {k: v for k, v in classify(rows).items() if k != "attention_mask"})


@program("one-example or refused: pad or refused: length", "positions are stretched by the longest row")
def stretched_positions() -> Case:
    """Positions as a share of the batch's length."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        share = torch.linspace(0, 1, ids.shape[1]).to(self.scale)[:, None] * self.scale
        hidden = self.layers(self.embed(ids) + share, src_key_padding_mask=mask == 0)
        return F.cross_entropy(self.head(hidden[:, 0]), labels)

    return text_case(forward, scale=nn.Parameter(torch.ones(16)))


TOKENS = "refused: token or " + COUPLED


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    """One mean over the tokens of all rows."""
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


@program(TOKENS, "a row's share of a mean over tokens depends on the other rows' lengths")
def token_mean_in_loop() -> Case:
    """nanoGPT's loss in the loop over rows of varying length."""
    return Case(gpt2(), id_rows(), causal, token_mean, options=MEAN)


@program(TOKENS, "a row's share of a mean over tokens depends on the other rows' lengths")
def token_mean_by_hand() -> Case:
    """The same by a sum and a count."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses.sum() / (labels != -100).sum()

    return Case(gpt2(), id_rows(), causal, loss, options=MEAN)


@program("refused: one loss or " + TOKENS, "a criterion must give one loss a row")
def token_mean_criterion() -> Case:
    """A criterion that divides by the tokens of the batch."""

    def criterion(output: Any, batch: Any) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        losses = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / (labels != -100).sum() * len(labels)

    return Case(gpt2(), id_rows(), causal, lambda m, b: m(b["input_ids"]), criterion)


@program("refused: loop or " + COUPLED, "rows are mixed")
def mixup_in_loop() -> Case:
    """Mixup in the loop."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        other = torch.randperm(len(batch[0]))
        output = model(0.7 * batch[0] + 0.3 * batch[0][other])
        return 0.7 * F.cross_entropy(output, batch[1]) + 0.3 * F.cross_entropy(output, batch[1][other])

    return outside(mlp(), numbers(), loss=loss)


@program("refused: loop or " + COUPLED, "every row sees the mean of the batch")
def standardised_in_loop() -> Case:
    """The loop standardises features by the batch."""
    return outside(mlp(), numbers(), loss=lambda m, b: F.cross_entropy(m(_standardise(b[0])), b[1]))


@program("refused: collator or " + COUPLED, "rows are mixed")
def mixup_in_collator() -> Case:
    """Mixup in the collator."""

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [0.7 * x + 0.3 * x.roll(1, 0), y]

    return outside(mlp(), numbers(), collate)


@program("refused: collator or " + COUPLED, "every row sees the mean of the batch")
def standardised_in_collator() -> Case:
    """The collator standardises features by the batch."""

    def collate(rows: list[Any]) -> list[torch.Tensor]:
        x, y = (torch.stack(column) for column in zip(*rows))
        return [_standardise(x), y]

    return Case(Wrapped(lambda self, x, y: F.cross_entropy(self.net(x), y), net=mlp()), numbers(), collate, unpack)


@program("refused: pack or refused: unit_map or refused: collator", "several examples share a row without a map")
def packed_without_map() -> Case:
    """DataCollatorWithFlattening without unit_map."""
    rows = [{"input_ids": row["input_ids"]} for row in id_rows()]
    return Case(build("Llama", "ForCausalLM"), rows, hf.DataCollatorWithFlattening())


@program("refused: carr or " + STATE, "hidden states of a batch are the next batch's input")
def carried_hidden_state() -> Case:
    """A language model whose LSTM states are carried from batch to batch."""
    kept: list[Any] = [None]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        state = kept[0] if kept[0] is not None and kept[0][0].shape[1] == len(batch[0]) else None
        output, state = model(batch[0], state)
        kept[0] = tuple(part.detach() for part in state)
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())

    model = Wrapped(
        lambda self, x, state: (lambda found: (self.head(found[0]), found[1]))(self.layer(self.embed(x), state))
    )
    model.embed, model.layer, model.head = nn.Embedding(20, 8), nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 20)
    ids = torch.randint(0, 20, (ROWS, 9))
    return outside(model, TensorDataset(ids[:, :-1], ids[:, 1:]), loss=loss)


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
