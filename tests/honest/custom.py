"""Models that people write themselves with torch's layers."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.data import TensorDataset

from .harness import ROWS, Case, program, register
from .kit import (
    CLASSES,
    MEAN,
    VOCABULARY,
    WIDTH,
    Wrapped,
    convnet,
    crossentropy,
    id_rows,
    images,
    keywords,
    labelled,
    mlp,
    numbers,
    padded,
    regression,
    texts,
    tokenizer,
    unpack,
)

PACKED = "lengths choose the tokens that a packed sequence holds"


def outside(model: nn.Module, rows: Any, collate: Any = None, loss: Any = crossentropy, **options: Any) -> Case:
    """A model that returns outputs; the loop computes the mean of a loss over rows."""
    return Case(model, rows, collate, loss, options=MEAN, **options)


def names() -> list[tuple[torch.Tensor, int]]:
    """Sequences of varying length with a class, as in torch's tutorial on names."""
    return [(torch.tensor(row["input_ids"]), n % CLASSES) for n, row in enumerate(id_rows())]


def with_lengths(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, lengths, labels), padded on the right."""
    lengths = torch.tensor([len(x) for x, _ in rows])
    return padded([x for x, _ in rows]), lengths, torch.tensor([y for _, y in rows])


def recurrent(kind: Any, forward: Any, bidirectional: bool = False, **parts: nn.Module) -> Wrapped:
    """An embedding, a recurrent layer and a head."""
    layer = kind(8, WIDTH, batch_first=True, bidirectional=bidirectional)
    head = nn.Linear(WIDTH * (1 + bidirectional), CLASSES)
    return Wrapped(forward, embed=nn.Embedding(VOCABULARY, 8, padding_idx=0), layer=layer, head=head, **parts)


@program()
def convolutions() -> Case:
    """A small convolutional network."""
    return outside(convnet(), images())


@program()
def group_norm_residual() -> Case:
    """A residual block with GroupNorm."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = F.relu(self.norm(self.second(F.relu(self.first(x)))) + x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)

    conv = {f: nn.Conv2d(8, 8, 3, 1, 1, bias=False) for f in ("first", "second")}
    parts = {"stem": nn.Conv2d(3, 8, 3, 2, 1), "norm": nn.GroupNorm(4, 8), "head": nn.Linear(8, CLASSES), **conv}
    return Case(Wrapped(forward, **parts), images(), None, unpack)


@program()
def frozen_batch_norm() -> Case:
    """Transfer learning: batch normalisation frozen and in eval mode."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = convnet(nn.BatchNorm2d)
            for module in self.norms():
                module.requires_grad_(False)

        def norms(self) -> list[nn.Module]:
            return [m for m in self.net.modules() if isinstance(m, nn.BatchNorm2d)]

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            for module in self.norms():
                module.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    return outside(Frozen().train(), images())


@program()
def instance_norm() -> Case:
    """InstanceNorm without running statistics."""
    return outside(convnet(lambda c: nn.InstanceNorm2d(c, affine=True)), images())


@program()
def depthwise_transposed() -> Case:
    """Depthwise and transposed convolutions in an autoencoder."""
    down = [nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, 1, 1, groups=6), nn.ReLU()]
    net = nn.Sequential(*down, nn.ConvTranspose2d(6, 3, 2, 2))
    return outside(net, images(), loss=lambda model, batch: F.mse_loss(model(batch[0]), batch[0]))


@program()
def convolution_1d_text() -> Case:
    """Convolutions over embeddings of texts of one length."""
    conv = nn.Sequential(nn.Conv1d(8, WIDTH, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
    model = Wrapped(lambda self, x: self.head(self.conv(self.embed(x).transpose(1, 2))), conv=conv)
    model.embed, model.head = nn.Embedding(VOCABULARY, 8), nn.Linear(WIDTH, CLASSES)
    return outside(model, TensorDataset(torch.randint(0, 90, (ROWS, 9)), torch.arange(ROWS) % CLASSES))


for _name, _kind in (("lstm", nn.LSTM), ("gru", nn.GRU), ("rnn", nn.RNN)):

    def _packed(kind: Any = _kind) -> Case:
        def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
            hidden = self.layer(packed)[1]
            return F.cross_entropy(self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[-1]), y)

        return Case(recurrent(kind, forward), names(), with_lengths, unpack)

    register(f"packed_{_name}", _packed, "one-example", PACKED)


@program("one-example", PACKED)
def gru_masked_attention() -> Case:
    """A bidirectional GRU, attention masked by lengths in a Python list."""

    def forward(self: Any, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(x), torch.tensor(lengths), True, enforce_sorted=False)
        states = rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]
        outside_row = torch.arange(x.shape[1])[None] >= torch.tensor(lengths)[:, None]
        weights = self.score(states).squeeze(-1).masked_fill(outside_row, -1e9).softmax(-1)
        return self.head((weights.unsqueeze(-1) * states).sum(1))

    def collate(rows: list[Any]) -> Any:
        x, lengths, y = with_lengths(rows)
        return x, lengths.tolist(), y

    model = recurrent(nn.GRU, forward, bidirectional=True, score=nn.Linear(2 * WIDTH, 1))
    loss = lambda model, batch: F.cross_entropy(model(batch[0], batch[1]), batch[2])  # noqa: E731
    return outside(model, names(), collate, loss)


@program("one-example or refused: pad", "the last time step is padding")
def last_step_of_padded() -> Case:
    """A tutorial's LSTM that reads the last time step of a padded batch."""
    model = recurrent(
        nn.LSTM, lambda self, x, lengths, y: F.cross_entropy(self.head(self.layer(self.embed(x))[0][:, -1]), y)
    )
    return Case(model, names(), with_lengths, unpack)


@program("one-example or refused: pad", "the mean runs over padding")
def mean_over_padding() -> Case:
    """A bag of words whose mean counts padding."""
    model = Wrapped(lambda self, x, lengths, y: F.cross_entropy(self.head(self.embed(x).mean(1)), y))
    model.embed, model.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, CLASSES)
    return Case(model, names(), with_lengths, unpack)


@program()
def masked_mean() -> Case:
    """The same with a mean over the row's own words."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        words = (x != 0).unsqueeze(-1)
        return F.cross_entropy(self.head((self.embed(x) * words).sum(1) / words.sum(1)), y)

    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, 8), head=nn.Linear(8, CLASSES))
    return Case(model, names(), with_lengths, unpack)


@program()
def lstm_language_model() -> Case:
    """A language model with tied embeddings over blocks of one length."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.embed(x))[0]).flatten(0, 1), y.flatten())

    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, WIDTH), head=nn.Linear(WIDTH, VOCABULARY, bias=False))
    model.layer, model.head.weight = nn.LSTM(WIDTH, WIDTH, batch_first=True), model.embed.weight
    return Case(model, blocks(), None, unpack)


def blocks(length: int = 12) -> TensorDataset:
    """Blocks of text, and the same moved by one."""
    ids = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def encoder(**options: Any) -> nn.TransformerEncoder:
    """torch's own transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attention(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the first token."""
    hidden = self.embed(ids) + self.position[: ids.shape[1]]
    return self.head(self.layers(hidden, src_key_padding_mask=mask == 0)[:, 0])


def text_model(forward: Any, **parts: Any) -> Wrapped:
    """Embeddings with learned positions, torch's encoder, and a head."""
    position = nn.Parameter(0.02 * torch.randn(32, WIDTH))
    head, embed = nn.Linear(WIDTH, CLASSES), nn.Embedding(VOCABULARY, WIDTH)
    return Wrapped(forward, embed=embed, position=position, layers=encoder(), head=head, **parts)


def id_collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Ids, mask and labels."""
    ids = padded([row["input_ids"] for row in rows])
    return {"ids": ids, "mask": (ids != 0).long(), "labels": torch.tensor([row["labels"] for row in rows])}


def text_case(forward: Any, **parts: Any) -> Case:
    """A text model that returns its loss."""
    return Case(text_model(forward, **parts), labelled(), id_collate, keywords)


@program()
def transformer_encoder_outside() -> Case:
    """nn.TransformerEncoder, cross-entropy in the loop."""
    loss = lambda model, batch: F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])  # noqa: E731
    return outside(text_model(attention), labelled(), id_collate, loss)


@program()
def transformer_encoder_inside() -> Case:
    """The same, loss inside."""
    return text_case(lambda self, ids, mask, labels: F.cross_entropy(attention(self, ids, mask), labels))


@program()
def fast_path_without_mask() -> Case:
    """A shortcut for batches without padding: `None if mask.all() else mask`."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=None if mask.all() else mask == 0)
        return F.cross_entropy(self.head(hidden[:, 0]), labels)

    return text_case(forward)


@program()
def checks_in_forward() -> Case:
    """Asserts on ids and on NaN in forward."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert ids.max() < VOCABULARY, "an id is out of range"
        logits = attention(self, ids, mask)
        if torch.isnan(logits).any():
            raise FloatingPointError("NaN")
        return F.cross_entropy(logits, labels)

    return text_case(forward)


@program()
def statistics_for_the_log() -> Case:
    """forward keeps means of activations for a log, by .item() and by hooks."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = attention(self, ids, mask)
        self.seen = {"logits": logits.abs().mean().item()}
        return F.cross_entropy(logits, labels)

    case, log = text_case(forward), []
    for module in case.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, output: log.append(output.detach().std().item()))
    return case


@program()
def attention_kept_for_plots() -> Case:
    """forward keeps its attention weights in an attribute."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights = (x @ x.transpose(1, 2)).masked_fill((mask == 0)[:, None], -1e9).softmax(-1)
        self.last_attention = weights.detach()
        return F.cross_entropy(self.head((weights @ x)[:, 0]), labels)

    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, WIDTH), head=nn.Linear(WIDTH, CLASSES))
    return Case(model, labelled(), id_collate, keywords)


@program()
def counter_buffer() -> Case:
    """A buffer counts forward passes, for annealing."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return F.cross_entropy(attention(self, ids, mask), labels)

    case = text_case(forward)
    case.model.register_buffer("passes", torch.zeros((), dtype=torch.long))
    return case


@program()
def cached_causal_mask() -> Case:
    """A causal mask made once and kept in an attribute; a sinusoidal buffer."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.layers(self.embed(x) + self.waves[: x.shape[1]], self.mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())

    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, WIDTH), layers=encoder(), mask=None)
    model.head = nn.Linear(WIDTH, VOCABULARY)
    model.register_buffer("waves", torch.randn(32, WIDTH))
    # A cached float32 mask does not meet float64 truth.
    return Case(model, blocks(), None, unpack, exact=False)


@program()
def logits_and_loss() -> Case:
    """nanoGPT's way: the model returns (logits, loss); weights are tied."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(x) + self.position(torch.arange(x.shape[1]))
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(hidden + self.out(mixed))
        return logits, F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1), ignore_index=-1)

    parts = {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    model = Wrapped(forward, **parts, position=nn.Embedding(32, WIDTH), head=nn.Linear(WIDTH, VOCABULARY, bias=False))
    model.embed = nn.Embedding(VOCABULARY, WIDTH)
    model.embed.weight = model.head.weight
    rows = TensorDataset(*(t.clone() for t in blocks().tensors))
    return Case(model, rows, lambda rows: tuple(torch.stack(t) for t in zip(*rows)), lambda m, b: m(*b)[1])


@program()
def texts_as_input() -> Case:
    """A model that takes texts and tokenizes them itself."""

    def forward(self: Any, sentences: list[str], labels: torch.Tensor) -> torch.Tensor:
        encoded = tokenizer()(list(sentences), padding=True, return_tensors="pt")
        return F.cross_entropy(attention(self, encoded["input_ids"], encoded["attention_mask"]), labels)

    rows = [(text, n % CLASSES) for n, text in enumerate(texts())]
    return Case(text_model(forward), rows, None, unpack)


@program("one-example", PACKED)
def sorted_inside() -> Case:
    """The model sorts rows by length before its LSTM, and labels with them."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = rnn.pack_padded_sequence(self.embed(x[order]), lengths, batch_first=True)
        hidden = self.layer(packed)[1][0][-1]
        return F.cross_entropy(self.head(hidden[order.argsort()]), y)

    return Case(recurrent(nn.LSTM, forward), names(), with_lengths, unpack)


@program("one-example or refused: first", "rows are on the second axis")
def time_first() -> Case:
    """nn.LSTM with time first: the collator returns [tokens, rows]."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.embed(x))[0].mean(0)), y)

    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, 8), layer=nn.LSTM(8, WIDTH), head=nn.Linear(WIDTH, CLASSES))
    rows = [(torch.tensor(row["input_ids"]), n % CLASSES) for n, row in enumerate(id_rows(low=7, high=7))]
    return Case(
        model, rows, lambda rows: (torch.stack([x for x, _ in rows], 1), torch.tensor([y for _, y in rows])), unpack
    )


@program("one-example or refused: row", "offsets choose which tokens a bag sees")
def embedding_bag_offsets() -> Case:
    """nn.EmbeddingBag with flat ids and offsets."""

    def collate(rows: list[Any]) -> Any:
        lengths = torch.tensor([0, *(len(x) for x, _ in rows)])
        return torch.cat([x for x, _ in rows]), lengths.cumsum(0)[:-1], torch.tensor([y for _, y in rows])

    model = Wrapped(lambda self, ids, offsets: self.head(self.bag(ids, offsets)), bag=nn.EmbeddingBag(VOCABULARY, 8))
    model.head = nn.Linear(8, CLASSES)
    return outside(model, names(), collate, lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


@program()
def matrix_factorisation() -> Case:
    """Recommendations: products of user and item embeddings."""
    draw = torch.Generator().manual_seed(0)
    rows = TensorDataset(*(torch.randint(0, 20, (ROWS,), generator=draw) for _ in "ui"), torch.rand(ROWS))
    model = Wrapped(lambda self, u, i: (self.user(u) * self.item(i)).sum(-1) + self.bias)
    model.user, model.item, model.bias = nn.Embedding(20, 4), nn.Embedding(20, 4), nn.Parameter(torch.zeros(1))
    return outside(model, rows, loss=lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]))


@program()
def tabular_categories() -> Case:
    """Numbers and categories, concatenated."""
    base = numbers()
    rows = TensorDataset(base.tensors[0], torch.arange(ROWS) % 5, base.tensors[1])
    model = Wrapped(
        lambda self, x, c: self.net(torch.cat([x, self.embed(c)], -1)), net=mlp(16), embed=nn.Embedding(5, 4)
    )
    return outside(model, rows, loss=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]))


@program()
def tabular_regression_dropout() -> Case:
    """An MLP with dropout and LayerNorm, mean squared error."""
    net = mlp(12, 1, nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2))
    return outside(net, regression(), loss=lambda m, b: F.mse_loss(m(b[0]).squeeze(1), b[1]))


for _name, _norm in (("weight_norm", parametrizations.weight_norm), ("orthogonal", parametrizations.orthogonal)):
    register(
        _name,
        lambda norm=_norm: outside(
            nn.Sequential(norm(nn.Linear(12, WIDTH)), nn.ReLU(), nn.Linear(WIDTH, 3)), numbers()
        ),
        "one-example",
        "the layer's weight is made of parameters",
    )


@program()
def dpr_own_passages() -> Case:
    """One question and three passages an example; softmax over its own passages."""

    def forward(self: Any, question: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        q, p = (self.head(self.embed(ids).sum(-2)) for ids in (question, passages.flatten(0, 1)))
        scores = (q.unsqueeze(1) * p.view(len(q), 3, -1)).sum(-1)
        return F.cross_entropy(scores, torch.zeros(len(q), dtype=torch.long))

    ids = torch.randint(0, 90, (ROWS, 4, 6), generator=torch.Generator().manual_seed(0))
    model = Wrapped(forward, embed=nn.Embedding(VOCABULARY, 8), head=nn.Linear(8, 8))
    return Case(model, TensorDataset(ids[:, 0], ids[:, 1:]), None, unpack)


@program("one-example", "the loss is written without torch's loss functions")
def conditional_random_field() -> Case:
    """BiLSTM-CRF: the log-partition in a Python loop over time."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layer(self.embed(x))[0])
        total, path = scores[:, 0], scores[:, 0].gather(1, y[:, :1]).squeeze(1)
        for t in range(1, x.shape[1]):
            step = torch.logsumexp(total.unsqueeze(2) + self.moves + scores[:, t].unsqueeze(1), 1)
            total = step
            path = path + self.moves[y[:, t - 1], y[:, t]] + scores[:, t].gather(1, y[:, t : t + 1]).squeeze(1)
        return (torch.logsumexp(total, 1) - path).mean()

    draw = random.Random(0)
    rows = [
        (torch.tensor(row["input_ids"]), torch.tensor([draw.randrange(3) for _ in range(6)]))
        for row in id_rows(low=6, high=6)
    ]
    model = recurrent(nn.LSTM, forward, moves=nn.Parameter(torch.randn(3, 3)))
    return Case(model, rows, None, unpack)
