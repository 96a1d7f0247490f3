"""Models that people write themselves with torch's layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.data import TensorDataset

from . import kit
from .harness import ROWS, Case, program, register, register_all

PACKED = "lengths choose the tokens that a packed sequence holds"


def outside(model: nn.Module, rows: Any, collate: Any = None, loss: Any = kit.crossentropy, **options: Any) -> Case:
    """A model that returns outputs; the loop computes the mean of a loss over rows."""
    return Case(model, rows, collate, loss, options=kit.MEAN, **options)


def names() -> list[tuple[torch.Tensor, int]]:
    """Sequences of varying length with a class, as in torch's tutorial on names."""
    return [(torch.tensor(row["input_ids"]), n % kit.CLASSES) for n, row in enumerate(kit.id_rows())]


def with_lengths(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, lengths, labels), padded on the right."""
    lengths = torch.tensor([len(x) for x, _ in rows])
    return kit.padded([x for x, _ in rows]), lengths, torch.tensor([y for _, y in rows])


def recurrent(kind: Any, forward: Any, bidirectional: bool = False, **parts: nn.Module) -> kit.Wrapped:
    """An embedding, a recurrent layer and a head."""
    layer = kind(8, kit.WIDTH, batch_first=True, bidirectional=bidirectional)
    head = nn.Linear(kit.WIDTH * (1 + bidirectional), kit.CLASSES)
    return kit.Wrapped(forward, embed=nn.Embedding(kit.VOCABULARY, 8, padding_idx=0), layer=layer, head=head, **parts)


def flat_bags(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Ids of all rows in one tensor, and where each row's begin, as in torch's tutorial on text classification."""
    lengths = torch.tensor([0, *(len(x) for x, _ in rows)])
    ids, labels = zip(*rows)
    return {"ids": torch.cat(ids), "offsets": lengths[:-1].cumsum(0), "labels": torch.tensor(labels)}


def _bags(inside: bool) -> Case:
    def forward(self: Any, ids: torch.Tensor, offsets: torch.Tensor, labels: Any = None) -> torch.Tensor:
        found = self.head(self.bag(ids, offsets))
        return found if labels is None else F.cross_entropy(found, labels)

    model = kit.Wrapped(forward, bag=nn.EmbeddingBag(kit.VOCABULARY, 8), head=nn.Linear(8, kit.CLASSES))
    if inside:
        return Case(model, names(), flat_bags, lambda m, b: m(**b))
    return outside(model, names(), flat_bags, lambda m, b: F.cross_entropy(m(b["ids"], b["offsets"]), b["labels"]))


_FLAT = "flat ids beside offsets are no rows: each example is collated alone"
register("bags_of_flat_ids_inside", lambda: _bags(True), "one-example", _FLAT)
register("bags_of_flat_ids_outside", lambda: _bags(False), "one-example", _FLAT)


@program()
def frozen_batch_norm() -> Case:
    """Transfer learning: batch normalisation frozen and in eval mode."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = kit.convnet(nn.BatchNorm2d)
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

    return outside(Frozen().train(), kit.images())


@program("one-example", PACKED)
def packed_lstm() -> Case:
    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return F.cross_entropy(self.head(self.layer(packed)[1][0][-1]), y)

    return Case(recurrent(nn.LSTM, forward), names(), with_lengths, kit.unpack)


@program("one-example or refused: pad", "the last time step is padding")
def last_step_of_padded() -> Case:
    """A tutorial's LSTM that reads the last time step of a padded batch."""
    model = recurrent(
        nn.LSTM, lambda self, x, lengths, y: F.cross_entropy(self.head(self.layer(self.embed(x))[0][:, -1]), y)
    )
    return Case(model, names(), with_lengths, kit.unpack)


@program("one-example or refused: pad", "the mean runs over padding")
def mean_over_padding() -> Case:
    model = kit.Wrapped(lambda self, x, lengths, y: F.cross_entropy(self.head(self.embed(x).mean(1)), y))
    model.embed, model.head = nn.Embedding(kit.VOCABULARY, 8), nn.Linear(8, kit.CLASSES)
    return Case(model, names(), with_lengths, kit.unpack)


def blocks(length: int = 12) -> TensorDataset:
    """Blocks of text, and the same moved by one."""
    ids = torch.randint(0, kit.VOCABULARY, (ROWS, length + 1), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def encoder(**options: Any) -> nn.TransformerEncoder:
    """torch's own transformer."""
    layer = nn.TransformerEncoderLayer(kit.WIDTH, 2, 24, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attention(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the first token."""
    hidden = self.embed(ids) + self.position[: ids.shape[1]]
    return self.head(self.layers(hidden, src_key_padding_mask=mask == 0)[:, 0])


def text_model(forward: Any, **parts: Any) -> kit.Wrapped:
    """Embeddings with learned positions, torch's encoder, and a head."""
    position = nn.Parameter(0.02 * torch.randn(32, kit.WIDTH))
    head, embed = nn.Linear(kit.WIDTH, kit.CLASSES), nn.Embedding(kit.VOCABULARY, kit.WIDTH)
    return kit.Wrapped(forward, embed=embed, position=position, layers=encoder(), head=head, **parts)


def id_collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Ids, mask and labels."""
    ids = kit.padded([row["input_ids"] for row in rows])
    return {"ids": ids, "mask": (ids != 0).long(), "labels": torch.tensor([row["labels"] for row in rows])}


def text_case(forward: Any, **parts: Any) -> Case:
    """A text model that returns its loss."""
    return Case(text_model(forward, **parts), kit.labelled(), id_collate, kit.keywords)


@program()
def fast_path_without_mask() -> Case:
    """A shortcut for batches without padding: `None if mask.all() else mask`."""

    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        hidden = self.layers(hidden, src_key_padding_mask=None if mask.all() else mask == 0)
        return F.cross_entropy(self.head(hidden[:, 0]), labels)

    return text_case(forward)


@program()
def attention_kept_for_plots() -> Case:
    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights = (x @ x.transpose(1, 2)).masked_fill((mask == 0)[:, None], -1e9).softmax(-1)
        self.last_attention = weights.detach()
        return F.cross_entropy(self.head((weights @ x)[:, 0]), labels)

    model = kit.Wrapped(forward, embed=nn.Embedding(kit.VOCABULARY, kit.WIDTH), head=nn.Linear(kit.WIDTH, kit.CLASSES))
    return Case(model, kit.labelled(), id_collate, kit.keywords)


@program()
def counter_buffer() -> Case:
    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return F.cross_entropy(attention(self, ids, mask), labels)

    case = text_case(forward)
    case.model.register_buffer("passes", torch.zeros((), dtype=torch.long))
    return case


@program()
def logits_and_loss() -> Case:
    """nanoGPT's way: the model returns (logits, loss); weights are tied."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(x) + self.position(torch.arange(x.shape[1]))
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, 2, kit.WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(hidden + self.out(mixed))
        return logits, F.cross_entropy(logits.view(-1, kit.VOCABULARY), y.view(-1), ignore_index=-1)

    parts = {
        "qkv": nn.Linear(kit.WIDTH, 3 * kit.WIDTH),
        "out": nn.Linear(kit.WIDTH, kit.WIDTH),
        "norm": nn.LayerNorm(kit.WIDTH),
    }
    model = kit.Wrapped(
        forward, **parts, position=nn.Embedding(32, kit.WIDTH), head=nn.Linear(kit.WIDTH, kit.VOCABULARY, bias=False)
    )
    model.embed = nn.Embedding(kit.VOCABULARY, kit.WIDTH)
    model.embed.weight = model.head.weight
    rows = TensorDataset(*(t.clone() for t in blocks().tensors))
    return Case(model, rows, lambda rows: tuple(torch.stack(t) for t in zip(*rows)), lambda m, b: m(*b)[1])


@program()
def texts_as_input() -> Case:
    def forward(self: Any, sentences: list[str], labels: torch.Tensor) -> torch.Tensor:
        encoded = kit.tokenizer()(list(sentences), padding=True, return_tensors="pt")
        return F.cross_entropy(attention(self, encoded["input_ids"], encoded["attention_mask"]), labels)

    rows = [(text, n % kit.CLASSES) for n, text in enumerate(kit.texts())]
    return Case(text_model(forward), rows, None, kit.unpack)


@program("one-example", "the layer's weight is made of parameters")
def weight_norm() -> Case:
    return outside(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 3)), kit.numbers()
    )


def _of_blocks(made: Any, given: Any = lambda x: x, *, swaps: bool = False) -> Case:
    """A recurrent language model on blocks of text: where the rows of its outputs lie, and of its inputs."""

    def forward(self: Any, x: torch.Tensor, state: Any = None) -> Any:
        return made(self.head(self.layer(self.embed(x), state)[0]))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        inputs = given(batch[0])
        found = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        logits = found.unflatten(0, batch[1].shape) if found.dim() == 2 else found
        logits = logits.transpose(0, 1) if swaps else logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    layer = nn.LSTM(8, kit.WIDTH, 2, batch_first=given is not _time_first)
    parts = {"embed": nn.Embedding(kit.VOCABULARY, 8), "layer": layer, "head": nn.Linear(kit.WIDTH, kit.VOCABULARY)}
    return outside(kit.Wrapped(forward, **parts), blocks(), loss=loss)


def _time_first(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _with_states(x: torch.Tensor) -> Any:
    state = torch.zeros(2, len(x), kit.WIDTH).to(torch.get_default_dtype())
    return x, (state, state)


register("outputs_time_first", lambda: _of_blocks(lambda z: z.transpose(0, 1), swaps=True))
register("outputs_flat", lambda: _of_blocks(lambda z: z.reshape(-1, kit.VOCABULARY)))
register("inputs_time_first", lambda: _of_blocks(lambda z: z, _time_first, swaps=True))


def _states_given(**options: Any) -> Case:
    case = _of_blocks(lambda z: z, _with_states)
    case.exact, case.options = False, {**case.options, **options}
    return case


# The loop makes zero states [layers, rows, width] for each batch; also with as many rows as layers.
register("hidden_states_given", _states_given)
register("hidden_states_of_two_rows", lambda: _states_given(max_physical_batch_size=2))


@program()
def class_embeddings_given() -> Case:
    """CLIP's classifier: the loop gives one embedding a class, and microbatches have as many rows."""
    embeddings = torch.randn(kit.CLASSES, kit.WIDTH, generator=torch.Generator().manual_seed(0))
    model = kit.Wrapped(
        lambda self, x, given: F.normalize(self.net(x), dim=-1) @ given.t(), net=nn.Linear(12, kit.WIDTH)
    )
    case = outside(model, kit.numbers(), loss=lambda m, b: F.cross_entropy(m(b[0], embeddings), b[1]), exact=False)
    case.options = {**case.options, "max_physical_batch_size": kit.CLASSES}
    return case


@program()
def recognition_outside() -> Case:
    """CRNN: outputs [time, rows, letters] and CTC in the loop, its targets one after the other."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x.transpose(0, 1))[0]).log_softmax(-1)

    def collate(rows: list[Any]) -> Any:
        x, y = zip(*rows)
        return torch.stack(x), torch.cat(y), torch.tensor([len(t) for t in y])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        scores = model(batch[0])
        frames = torch.full((scores.shape[1],), scores.shape[0])
        return F.ctc_loss(scores, batch[1], frames, batch[2], zero_infinity=True)

    draw = torch.Generator().manual_seed(0)
    rows = [(torch.rand(8, 4, generator=draw), torch.randint(1, 6, (1 + n % 3,), generator=draw)) for n in range(ROWS)]
    return outside(kit.Wrapped(forward, layer=nn.LSTM(4, 8), head=nn.Linear(8, 6)), rows, collate, loss)


@program("one-example", "isolation='per_example' runs each example alone")
def recognition_in_isolation() -> Case:
    """The same, each example by itself."""
    case = recognition_outside()
    case.options, case.exact = {**kit.MEAN, "isolation": "per_example"}, False
    return case


@program("one-example", PACKED)
def packed_outputs_outside() -> Case:
    """A tagger: packed sequences are padded again within the model, to the longest of the batch."""

    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids, lengths, _ = batch
        targets = (ids % kit.CLASSES).masked_fill(ids == 0, -100)
        losses = F.cross_entropy(model(ids, lengths).transpose(1, 2), targets, reduction="none")
        return (losses.sum(1) / lengths).mean()

    return outside(recurrent(nn.LSTM, forward), names(), with_lengths, loss)


def _several_outputs(forward: Any, loss: Any, **parts: Any) -> Case:
    return outside(kit.Wrapped(forward, **parts), kit.numbers(), loss=loss)


@program()
def members_first() -> Case:
    loss = lambda m, b: sum(F.cross_entropy(z, b[1]) for z in m(b[0])) / 3  # noqa: E731
    nets = nn.ModuleList(kit.mlp() for _ in range(3))
    return _several_outputs(lambda self, x: torch.stack([net(x) for net in self.nets]), loss, nets=nets)


@program()
def inputs_among_outputs() -> Case:
    """The model returns its inputs and its features beside the logits."""
    loss = lambda m, b: F.cross_entropy(m(b[0])["logits"], b[1])  # noqa: E731

    def forward(self: Any, x: torch.Tensor) -> dict[str, Any]:
        found = self.net(x)
        return {"logits": found / 2, "features": [x, found], "rows": len(x)}

    return _several_outputs(forward, loss, net=kit.mlp())


@program("refused: whole loss", "the gradient of a value that rows share is not any row's")
def temperature_among_outputs() -> Case:
    """CLIP's way: features and a learned temperature, the scores in the loop."""
    loss = lambda m, b: (lambda z: F.cross_entropy(z[0] * z[1], b[1]))(m(b[0]))  # noqa: E731
    model = _several_outputs(lambda self, x: (self.net(x), self.scale.exp()), loss, net=kit.mlp())
    model.model.scale = nn.Parameter(torch.zeros(()))
    return model


@program()
def temperature_in_forward() -> Case:
    """The same with the loss in forward()."""
    model = kit.Wrapped(lambda self, x, y: F.cross_entropy(self.net(x) * self.scale.exp(), y), net=kit.mlp())
    model.scale = nn.Parameter(torch.zeros(()))
    return Case(model, kit.numbers(), None, kit.unpack)


@program()
def letters_in_forward() -> Case:
    """One letter at a time within forward()."""

    def forward(self: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        state, loss = None, torch.zeros(())
        for place in range(ids.shape[1]):
            found, state = self.layer(self.embed(ids[:, place])[None], state)
            loss = loss + F.cross_entropy(self.head(found[0]), targets[:, place])
        return loss

    parts = {"layer": nn.GRU(8, kit.WIDTH), "head": nn.Linear(kit.WIDTH, kit.VOCABULARY)}
    return Case(kit.Wrapped(forward, embed=nn.Embedding(kit.VOCABULARY, 8), **parts), blocks(), None, kit.unpack)


@program()
def ids_of_activations() -> Case:
    """Activations are rounded to the ids of a table, columns first."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        ids = (hidden.sigmoid() * 7).long().t()[:2]
        return F.cross_entropy(self.head(hidden + self.table(ids).mean(0)), y)

    parts = {"body": nn.Linear(12, kit.WIDTH), "table": nn.Embedding(8, kit.WIDTH), "head": nn.Linear(kit.WIDTH, 3)}
    return Case(kit.Wrapped(forward, **parts), kit.numbers(), None, kit.unpack)


@program()
def compiled_block() -> Case:
    net = kit.mlp(12, kit.CLASSES, nn.Sequential(nn.ReLU(), nn.Linear(kit.WIDTH, kit.WIDTH), nn.ReLU()))
    net[1] = torch.compile(net[1], backend="eager")
    return outside(net, kit.numbers())


@program()
def double_precision() -> Case:
    x, y = kit.numbers().tensors
    return outside(kit.mlp().double(), TensorDataset(x.double(), y))


@program()
def experts_in_a_loop() -> Case:
    """Each row goes to the two experts of the largest scores, one after the other."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            for place in range(2):
                own = chosen[:, place] == number
                if own.any():
                    mixed[own] += scores[own, place, None] * expert(x[own])
        return self.head(mixed)

    experts = nn.ModuleList(kit.mlp(12, 12) for _ in range(4))
    model = kit.Wrapped(forward, gate=nn.Linear(12, 4), experts=experts, head=nn.Linear(12, kit.CLASSES))
    return outside(model, kit.numbers())


@program()
def checkpointed_pieces() -> Case:
    """torch.utils.checkpoint by hand, with dropout in what is computed again."""
    piece = nn.Sequential(nn.Linear(kit.WIDTH, kit.WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(kit.WIDTH, kit.WIDTH))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.piece, self.first(x), use_reentrant=False))

    head = nn.Linear(kit.WIDTH, kit.CLASSES)
    return outside(kit.Wrapped(forward, first=nn.Linear(12, kit.WIDTH), piece=piece, head=head), kit.numbers())


@program()
def patches_of_channels() -> Case:
    """PatchTST: torch's attention over a series' patches, every channel of every example by itself."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        patches = x.unfold(2, 4, 2)
        hidden = self.layer(self.embed(patches).flatten(0, 1))
        return self.head(hidden.flatten(1)).unflatten(0, patches.shape[:2]).mean(1)

    layer = nn.TransformerEncoderLayer(kit.WIDTH, 2, kit.WIDTH, 0.0, batch_first=True)
    parts = {"embed": nn.Linear(4, kit.WIDTH), "layer": layer, "head": nn.Linear(3 * kit.WIDTH, kit.CLASSES)}
    rows = TensorDataset(torch.rand(ROWS, 3, 8), torch.randint(kit.CLASSES, (ROWS,)))
    return outside(kit.Wrapped(forward, **parts), rows)


@program()
def pixels_time_first() -> Case:
    """Image GPT: pixels become tokens inside the model, time first."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed((x * 3.99).long().t()))[0][-1])

    parts = {"embed": nn.Embedding(4, 8), "layer": nn.GRU(8, kit.WIDTH), "head": nn.Linear(kit.WIDTH, kit.CLASSES)}
    return outside(kit.Wrapped(forward, **parts), kit.numbers())


@program()
def learned_first_input() -> Case:
    """A pointer network's decoder, whose cell begins with a learned input."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = self.cell(self.start.expand(len(x), -1), (x, x))
        return self.head(self.cell(state[0], state)[0])

    start = nn.Parameter(torch.zeros(12))
    return outside(kit.Wrapped(forward, start=start, cell=nn.LSTMCell(12, 12), head=kit.mlp()), kit.numbers())


@program()
def letters_as_ones() -> Case:
    """A tutorial's recurrent model of names; each letter is a vector of zeros and a one, cast like a weight."""

    def forward(self: Any, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, losses = self.hidden.weight.new_zeros(len(ids), kit.WIDTH), []
        for place in range(ids.shape[1]):
            letter = F.one_hot(ids[:, place], kit.VOCABULARY).to(self.hidden.weight)
            hidden = torch.tanh(self.hidden(torch.cat([letter, hidden], 1)))
            losses.append(F.cross_entropy(self.head(hidden), targets[:, place]))
        return torch.stack(losses).mean()

    parts = {"hidden": nn.Linear(kit.VOCABULARY + kit.WIDTH, kit.WIDTH), "head": nn.Linear(kit.WIDTH, kit.VOCABULARY)}
    return Case(kit.Wrapped(forward, **parts), blocks(), None, kit.unpack)


@program("refused: own outputs", "each pass of a batch is clipped by itself")
def one_letter_at_a_time() -> Case:
    """A tutorial's recurrent model, which the loop calls once a letter."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids, targets = batch
        hidden, losses = torch.zeros(1, len(ids), kit.WIDTH), torch.zeros(())
        for place in range(ids.shape[1]):
            scores, hidden = model(ids[:, place], hidden)
            losses = losses + F.cross_entropy(scores, targets[:, place])
        return losses

    def forward(self: Any, ids: torch.Tensor, state: torch.Tensor) -> Any:
        found, state = self.layer(self.embed(ids)[None], state)
        return self.head(found[0]), state

    parts = {"layer": nn.GRU(8, kit.WIDTH), "head": nn.Linear(kit.WIDTH, kit.VOCABULARY)}
    return outside(kit.Wrapped(forward, embed=nn.Embedding(kit.VOCABULARY, 8), **parts), blocks(), loss=loss)


@program()
def time_first_translation() -> Case:
    """torch's tutorial: a collator with time first, and masks that the loop makes."""

    def collate(rows: list[Any]) -> Any:
        return tuple(rnn.pad_sequence([torch.tensor(row[key]) for row in rows]) for key in ("input_ids", "labels"))

    def forward(self: Any, source: torch.Tensor, target: torch.Tensor, later: torch.Tensor, *padding: Any) -> Any:
        given = self.source(source), self.target(target)
        masks = dict(zip(("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"), padding))
        return self.head(self.layers(*given, tgt_mask=later, **masks))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        source, given, wanted = batch[0], batch[1][:-1], batch[1][1:]
        later = torch.triu(torch.ones(len(given), len(given)), 1).bool()
        padding = (source == 0).t(), (given == 0).t(), (source == 0).t()
        scores = model(source, given, later, *padding)
        losses = F.cross_entropy(scores.permute(1, 2, 0), wanted.t(), ignore_index=0, reduction="none")
        return (losses.sum(1) / (wanted != 0).sum(0)).mean()

    tables = {name: nn.Embedding(kit.VOCABULARY, kit.WIDTH) for name in ("source", "target")}
    layers, head = nn.Transformer(kit.WIDTH, 2, 1, 1, 24), nn.Linear(kit.WIDTH, kit.VOCABULARY)
    return outside(kit.Wrapped(forward, layers=layers, head=head, **tables), kit.pair_rows(), collate, loss)


def _summed(pads_itself: bool) -> Case:
    """Sums of embeddings, whose row of padding is zero, over the texts' own lengths."""

    def collate(rows: list[Any]) -> Any:
        texts, labels = zip(*rows)
        return list(texts) if pads_itself else kit.padded(texts), torch.tensor(labels)

    def forward(self: Any, texts: Any, lengths: list[int]) -> torch.Tensor:
        ids = kit.padded(texts) if pads_itself else texts
        return self.head(self.embed(ids).sum(1) / torch.tensor(lengths)[:, None])

    def loss(model: Any, batch: Any) -> torch.Tensor:
        texts, labels = batch
        return F.cross_entropy(model(texts, [int((own != 0).sum()) for own in texts]), labels)

    model = kit.Wrapped(forward, embed=nn.Embedding(kit.VOCABULARY, 8, padding_idx=0), head=nn.Linear(8, kit.CLASSES))
    return outside(model, names(), collate, loss)


register_all({"list_of_texts": True, "list_of_lengths": False}, _summed, "summed_embeddings_")


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "instance_norm": lambda: outside(kit.convnet(lambda c: nn.InstanceNorm2d(c, affine=True)), kit.images()),
    "transformer_encoder_outside": lambda: outside(
        text_model(attention),
        kit.labelled(),
        id_collate,
        lambda model, batch: F.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"]),
    ),
}
register_all(ONE_LINE, lambda build: build())


def graphs(count: int = ROWS, nodes: int = 0) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Rings of three to seven nodes, or all of so many: features, edges, class."""
    generator = torch.Generator().manual_seed(0)
    sizes = [nodes or 3 + n % 5 for n in range(count)]
    rings = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in sizes]
    return [(torch.rand(len(r[0]), 6, generator=generator), r, n % kit.CLASSES) for n, r in enumerate(rings)]


def disjoint_union(rows: list[Any]) -> dict[str, torch.Tensor]:
    """One graph of all, as graph libraries collate: nodes one after another, and the graph of each."""
    sizes = torch.tensor([len(x) for x, _, _ in rows])
    starts = sizes.cumsum(0) - sizes
    return {
        "x": torch.cat([x for x, _, _ in rows]),
        "edges": torch.cat([edges + start for (_, edges, _), start in zip(rows, starts)], 1),
        "graph": torch.arange(len(rows)).repeat_interleave(sizes),
        "y": torch.tensor([y for _, _, y in rows]),
    }


def _convolved(self: Any, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    hidden = F.relu(hidden + torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]]))
    count = torch.bincount(graph)
    return self.last(hidden.new_zeros(len(count), kit.WIDTH).index_add(0, graph, hidden) / count[:, None])


def _instances(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = disjoint_union(rows)
    return made["x"], torch.bincount(made["graph"]), made["y"]


def _attended(self: Any, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    parts = F.relu(self.first(x)).split(sizes.tolist())
    return self.last(torch.stack([(self.score(part).softmax(0) * part).sum(0) for part in parts]))


def _of_graphs(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"], batch["edges"], batch["graph"]), batch["y"])


def _layers(**parts: nn.Module) -> dict[str, nn.Module]:
    return {"first": nn.Linear(6, kit.WIDTH), "last": nn.Linear(kit.WIDTH, kit.CLASSES), **parts}


#: Collators that join what examples have several of: the model, what it makes, the collator, and the loop's loss.
JOINED: dict[str, tuple[Any, ...]] = {
    "graphs": (lambda: kit.Wrapped(_convolved, **_layers()), 0, disjoint_union, _of_graphs),
    "graphs_of_one_size": (lambda: kit.Wrapped(_convolved, **_layers()), 6, disjoint_union, _of_graphs),
    "bags_of_instances": (
        lambda: kit.Wrapped(_attended, **_layers(score=nn.Linear(kit.WIDTH, 1))),
        0,
        _instances,
        lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
    ),
}
register_all(
    JOINED,
    lambda parts: outside(parts[0](), graphs(nodes=parts[1]), parts[2], parts[3]),
    expect="one-example",
    why="no slice of the joined tensor belongs to one row: each example is collated alone",
)


def _few_tokens(self: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """ELECTRA's generator: logits of masked tokens alone, of which a row may have none."""
    flat = labels.reshape(-1)
    places = (flat >= 0).nonzero().squeeze()
    hidden = self.embed(ids).tanh().reshape(-1, 8).index_select(0, places)
    return F.cross_entropy(self.head(hidden), flat.index_select(0, places), reduction="sum") / len(ids)


def _hidden_tokens(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = kit.padded([row["input_ids"] for row in rows])
    return ids, ids.masked_fill(ids % 7 != 0, -100).masked_fill(ids == 0, -100)


@program()
def masked_tokens_by_index() -> Case:
    parts = {"embed": nn.Embedding(kit.VOCABULARY, 8), "head": nn.Linear(8, kit.VOCABULARY)}
    return Case(kit.Wrapped(_few_tokens, **parts), kit.id_rows(), _hidden_tokens, kit.unpack)


@program()
def rows_added_by_index() -> Case:
    """A layer for rows of one kind."""

    def forward(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, chosen = self.first(x).relu(), (x[:, 0] > 0.5).nonzero().squeeze()
        hidden = hidden.index_add(0, chosen, self.second(x.index_select(0, chosen)))
        return F.cross_entropy(self.head(hidden), y)

    parts = {"first": nn.Linear(12, 8), "second": nn.Linear(12, 8), "head": nn.Linear(8, kit.CLASSES)}
    return Case(kit.Wrapped(forward, **parts), kit.numbers(), None, kit.unpack)
