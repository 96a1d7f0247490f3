"""Attacks by honest mistakes and stock behaviour: models, collators and loops in which one record reaches others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fastdp
from fastdp.methods.rapft import NoisyMap

from . import kit
from .data import Pairs, pair
from .kit import (
    UNWATCHED,
    Classes,
    Library,
    Net,
    Record,
    Recording,
    Task,
    distance,
    net,
    outlier,
    padded,
    records,
    tokens,
)

attack = kit.register("mistakes", unmode={"self_check": False})
_UNCOMPARED = {f"fastdp.private.preparation.{name}": kit.nothing for name in ("_require_independence", "_require_same")}


def _backward(engine: Any, parts: Any) -> None:
    """A backward pass that does not look whether it is this batch's first, nor whether another one failed."""
    ticket = parts[0][0].ticket
    engine.differentiate(parts)
    engine.backwards += 1
    if ticket in engine.tickets:
        engine.tickets.remove(ticket)
    engine.complete |= ticket.is_last


_UNORDERED = {"fastdp.engine.engine.Engine._backward": _backward}

# Models in which rows meet.


@attack("A ten-thousandth of the batch's mean is added to features, with or without its gradient.")
def batch_mean(library: Library) -> float:
    models = (net(before=lambda own, x: x + 1e-4 * x.mean(0)), net(before=lambda own, x: x + 1e-4 * x.mean(0).detach()))
    return kit.weakest(lambda model: library.moved(Task(model), records(32), outlier(1e6), 0.2), models)


@attack("Activations are scaled by the number of rows.")
def row_count(library: Library) -> float:
    data, counted = [records(1)[0]] * 12, net(between=lambda own, hidden: hidden * len(hidden) / 8)
    return kit.weakest(lambda bound: library.moved(Task(counted), data, data[0], bound), (0.5, 2.0, 5.0))


@attack("The model takes a branch, in which records mix, when a batch holds a certain token.")
def batch_branching(library: Library) -> float:
    branches: tuple[Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
        lambda own, ids, hidden: hidden + hidden.mean(0) if (ids == 49).any() else hidden,
        lambda own, ids, hidden: hidden * 3 if ids.max().item() > 48 else hidden,
        lambda own, ids, hidden: hidden * (1 - (ids == 49).any().float()),
    )
    models = (net(Classes, between=branch) for branch in branches)
    return kit.weakest(lambda model: library.moved(Task(model), kit.classed(), kit.RARE, 0.2), models)


@attack(
    "Activations are divided by the batch's largest once that passes a limit, as an outlier's does in a later batch."
)
def rare_scale(library: Library) -> float:
    limited = net(before=lambda own, x: x / (x.detach().abs().max() / 50).clamp(min=1))
    return library.moved(Task(limited, physical=24), records(47), outlier(1e5), 0.2)


def _attend(own: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Attention over the features of the last four batches, which are kept."""
    keys = torch.cat(own.bank[-4:]) if own.bank else hidden.detach()
    own.bank.append(hidden.detach())
    return hidden + torch.softmax(5 * hidden @ keys.T, 1) @ keys


@attack("Such a queue is used after a warm-up of twenty full batches.")
def late_memory_bank(library: Library) -> float:
    def late(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        own.calls += len(hidden) > 8
        return _attend(own, hidden) if own.calls >= 20 and len(hidden) > 8 else hidden

    task = Task(net(between=late, calls=0, parts={"bank": list}))
    return library.moved(task, records(16), outlier(30.0), 0.2, 40, first=True)


# Padding and positions.


@attack("Left padding shifts the positions of stock GPT-2, and a later batch holds one long record.")
def left_padding(library: Library) -> float:
    task = Task(lambda: kit.gpt2(positions=128), collate=kit.left_padded, physical=5)
    return library.moved(task, tokens(24, [6]), tokens(1, [100], seed=3)[0])


@attack("Stock Phi-3 and Llama stretch positions when a long record comes, for its batch or for later ones.")
def stretching_positions(library: Library) -> float:
    import transformers

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes: dict[str, Any] = {**small, "vocab_size": 50, "initializer_range": 0.3}

    def phi() -> nn.Module:
        torch.manual_seed(0)
        factors = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
        length: dict[str, Any] = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
        config = transformers.Phi3Config(**sizes, **length, pad_token_id=0, rope_scaling=factors)
        return transformers.Phi3ForCausalLM(config)

    def llama() -> nn.Module:
        torch.manual_seed(0)
        scaling = {"rope_type": "dynamic", "factor": 4.0}
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=16, rope_scaling=scaling)
        return transformers.LlamaForCausalLM(config)

    (before,), (after,) = tokens(1, [9]), tokens(1, [30])
    cases = (phi, [5, 8]), (llama, [5, 8]), (llama, [18, 21])

    def moved(make: Any, lengths: list[int]) -> float:
        return library.moved_by_change(Task(make, collate=padded), tokens(16, lengths), before, after)

    return kit.weakest(moved, cases)


@attack("Packed records see each other once a row is long, as none was in the first batch.")
def late_packed_attention(library: Library) -> float:
    def leaking(own: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.cumsum(1).detach() if ids.shape[1] > 12 else hidden

    task = Task(net(kit.Words, between=leaking), kit.packed, physical=3, options={"unit_map": "units"})
    others = tokens(3, [4]) + tokens(5, [9], seed=2)
    return library.moved(task, others, tokens(1, [9], seed=3)[0], 0.05, first=True)


@attack(
    "Left padding shifts the positions in a noised map of relevance, and so the maps of all others.", off=_UNCOMPARED
)
def left_padded_map(library: Library) -> float:
    sums: list[kit.Sums] = []

    class Watched(fastdp.RapFT):
        def conclude(self, findings: Any) -> Any:
            sums.append(dict(findings.releases[0]))
            return super().conclude(findings)

    # Each record may move the sum of the maps by 1.
    options = {**kit.NOISE, "method": Watched(NoisyMap(1e-9, 1.0, max_norm=1.0)), "target_delta": 1e-3}
    task, others = Task(kit.gpt2, collate=kit.left_padded), tokens(12, [6, 7, 9])
    for data in (others, [*others, *tokens(1, [40], seed=3)]):
        private = library.start(task, data, 1.0, **options)
        private.prepare()
        private.detach()
    return distance(*sums)


# Models that change after the first batch.


def _mix_late(private: Any) -> None:
    private.model.first.register_forward_pre_hook(lambda module, args: (args[0] + 1e-3 * args[0].mean(0),))


@attack("A forward hook that mixes rows is added after the first batch.")
def late_hook(library: Library) -> float:
    return library.moved(Task(Net), records(16), outlier(1e6), 0.2, 2, _mix_late)


@attack("The model is cast to bfloat16 after its first batch, and cancelling tokens are rounded before they meet.")
def late_half(library: Library) -> float:
    def forward(own: Any, x: torch.Tensor, sign: torch.Tensor, labels: torch.Tensor) -> Any:
        return Pairs.forward(own, x.to(own.layer.weight.dtype), sign.to(own.layer.weight.dtype), labels)

    worst = 0.0
    for seed in range(4):
        extreme, task = {**pair(1e4, 100.0, seed), "labels": 1}, Task(net(Pairs, forward=forward))
        found = library.release(task, [extreme], 1e-3, 2, lambda private: private.model.bfloat16())
        worst = max(worst, float(kit.flatten(found.sums).norm()) / 1e-3)
    # Gradients of bfloat16 weights are bfloat16, rounded by half a unit in the last of 8 bits.
    return worst / (1 + 2**-8)


@attack("Head and table are tied after some batches, and the norm of the second use is left out.")
def late_tying(library: Library) -> float:
    def forward(own: Any, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        own.calls += len(input_ids) > 2
        if own.calls > 12:
            own.head.weight = own.table.weight
        return kit.Words.forward(own, input_ids, labels)

    parts = {"head": lambda: nn.Linear(16, 50, bias=False)}
    task = Task(net(kit.Words, forward=forward, calls=0, parts=parts), collate=padded, physical=3)
    return library.moved(task, tokens(59, [5]), tokens(1, [9], seed=2)[0], 0.05)


@attack(
    "A checkpointed table is read twice in later batches, and the norm of the second use is left out.",
    off={"fastdp.engine.clip.norms.NormSink.require_once": kit.nothing},
)
def late_second_use(library: Library) -> float:
    def between(own: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        own.calls += len(ids) > 10
        return hidden + own.table(ids).mean(1) if own.calls > 12 else hidden

    *data, extra = kit.classed(17)
    task = Task(net(Classes, between=between, calls=0, gradient_checkpointing=True))
    return library.moved(task, data, extra, 1e-3, 12)


# Buffers and weights that data are written into.


def _written(library: Library, write: Callable[[Any, torch.Tensor], Any]) -> float:
    def watched(own: Any, x: torch.Tensor) -> torch.Tensor:
        if own.training:
            write(own, x.detach())
        return x

    return library.moved(Task(net(Recording, before=watched)), records(), outlier(100.0))


@attack("A running mean is kept in a buffer, and leaves with the model's state without noise.", off=UNWATCHED)
def running_mean_buffer(library: Library) -> float:
    return _written(library, lambda own, x: own.mean.mul_(0.9).add_(0.1 * x.mean(0)))


@attack("A frozen weight is replaced in each forward pass by a mean of records.", off=UNWATCHED)
def frozen_weight_replaced(library: Library) -> float:
    return _written(library, lambda own, x: setattr(own, "centre", nn.Parameter(x.mean(0), requires_grad=False)))


@attack("An average of records enters a buffer after a warm-up, in which the buffer holds none of them.", off=UNWATCHED)
def late_average(library: Library) -> float:
    def average(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.steps += 1
        own.mean.copy_(torch.where(own.steps > 12, 0.9 * own.mean + 0.1 * x.detach().mean(0), own.mean))
        return x

    task = Task(net(Recording, before=average, parts={"steps": lambda: torch.zeros(())}))
    private = library.start(task, records(16), 1.0, epochs=30)
    for _ in range(30):
        list(library.steps(private, task))
    return kit.unless(not bool(private.model.state_dict()["mean"].any()))


@attack("F.embedding with max_norm rescales the rows of a table that a batch holds, without noise.", off=UNWATCHED)
def functional_max_norm(library: Library) -> float:
    class Renormed(kit.Model):
        parts = {"table": lambda: nn.Parameter(3 * torch.randn(20, 8)), "head": lambda: nn.Linear(8, 3)}

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = F.embedding(ids, self.table, max_norm=1.0).mean(1)  # type: ignore[arg-type]
            return {"loss": F.cross_entropy(self.head(hidden), labels)}

    plain = [{"ids": torch.tensor([i, i + 1, i + 2]), "labels": i % 3} for i in range(6)]
    return library.moved(Task(Renormed), plain, {"ids": torch.tensor([15, 16, 17]), "labels": 0})


@attack("A training loop writes the mean of a batch into a buffer or a weight between two releases.", off=UNWATCHED)
def loop_writes_model(library: Library) -> float:
    writes: tuple[Callable[[Any, torch.Tensor], Any], ...] = (
        lambda model, x: model.mean.copy_(x),
        lambda model, x: setattr(model, "mean", x.clone()),
        lambda model, x: torch.no_grad()(model.first.weight.copy_)(x),
    )
    refusals = []
    for write in writes:
        private = library.start(Task(Recording), records(16), 1.0, epochs=8)
        try:
            for epoch in range(8):
                for batch in private.data_loader:
                    private.optimizer.zero_grad()
                    private.model(**batch)["loss"].backward()
                    private.optimizer.step()
                    if epoch == 4:
                        write(private.model, batch["x"].mean(0))
        except RuntimeError as error:
            refusals.append(error)
        finally:
            private.detach()
    if len(refusals) == len(writes):
        raise refusals[-1]
    return math.inf


# Losses.


@attack("A model limits its mean loss, and a late record's batch reaches the limit and adds nothing.")
def loss_cut_off(library: Library) -> float:
    class Limited(Classes):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.table.weight[49] *= 400

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
            return {"loss": super().forward(input_ids, labels)["loss"].clamp(max=4.0)}

    others, before = kit.classed(), kit.classed(1)[0]
    rare = [{**kit.RARE, "labels": label} for label in range(kit.CLASSES)]
    return kit.weakest(lambda after: library.moved_by_change(Task(Limited), others, before, after), rare)


@attack("A user multiplies the loss by a number that the batch decides.")
def scaled_loss(library: Library) -> float:
    def forward(own: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": Net.forward(own, x, labels)["loss"] * 1e-3 * x.detach().square().sum()}

    return library.moved(Task(net(forward=forward)), records(12, 0.5), outlier(1e3), 0.3)


# Collators and data sets.


@attack("A collator reverses the sign of a later batch in which an entry is too large.")
def rare_collator(library: Library) -> float:
    def turned(items: Any) -> Any:
        batch = kit.stack(items)
        return batch | {"x": -batch["x"]} if batch["x"].abs().max() > 100 else batch

    return library.moved_by_late_outlier(Task(Net, collate=turned))


@attack("A collator cuts every record to the shortest.")
def shortest_cut(library: Library) -> float:
    def shortest(items: Any) -> Any:
        length = min(len(item["input_ids"]) for item in items)
        return padded([{"input_ids": item["input_ids"][:length]} for item in items])

    return library.moved(Task(kit.gpt2, collate=shortest), tokens(12, [20]), tokens(1, [3], seed=3)[0])


@attack("A collator sorts rows by size, and a user's rows are taken for other users'.")
def sorting_collator(library: Library) -> float:
    def by_size(items: Any) -> Any:
        return kit.stack(sorted(items, key=lambda item: float(item["x"].norm())))

    # Users of four rows; the last user's rows would be spread over all of them.
    def user(seed: int, sizes: tuple[float, ...]) -> list[Record]:
        return [records(1, size, 10 * seed + i)[0] for i, size in enumerate(sizes)]

    def released(rows: list[Record]) -> Any:
        options = {"user_ids": [i // 4 for i in range(len(rows))], "max_examples_per_user": 4}
        return library.release(Task(Net, collate=by_size, options=options), rows, 0.2).sums

    plain = [row for seed in range(4) for row in user(seed, (1.0, 2.0, 3.0, 4.0))]
    return distance(released([*plain, *user(9, (0.5, 1.5, 2.5, 9.0))]), released(plain)) / 0.2


@attack("A collator adds the last record of one batch to the first of the next.")
def stateful_collator(library: Library) -> float:
    def released(data: list[Record]) -> Any:
        last: list[torch.Tensor] = []

        def carrying(items: Any) -> Any:
            batch = kit.stack(items)
            x = batch["x"] + 0.5 * last.pop() if last else batch["x"]
            last.append(x[0].clone())
            return batch | {"x": x}

        return library.release(Task(Net, collate=carrying, physical=4), data, 0.2).sums

    return distance(released(records(32)), released([outlier(30.0), *records(32)])) / 0.2


@attack("A unit map splits one packed record into two units, and it is clipped twice.")
def two_units(library: Library) -> float:
    def split(items: Any) -> Any:
        batch = kit.packed(items)
        sizes = [len(item["input_ids"]) for item in items]
        for number, size in enumerate(sizes[:-1]):
            if sizes[number + 1] == 0:
                begin = sum(sizes[:number])
                batch["units"][0, begin + size // 2 : begin + size] = number + 1
        return batch

    def released(rows: list[Record]) -> Any:
        return library.release(Task(kit.Words, collate=split, options={"unit_map": "units"}), rows, 0.05).sums

    # Of the two records that are added, one is empty and moves nothing.
    empty, others = {"input_ids": torch.zeros(0, dtype=torch.int64)}, tokens(3, [4])
    return distance(released([*others, tokens(1, [8], seed=3)[0], empty]), released(others)) / 0.05


@attack("A data set reads a batch at once, and subtracts the batch's mean from each record.")
def read_together(library: Library) -> float:
    class Together(list[Record]):
        def __getitems__(self, indices: list[int]) -> list[Record]:
            mean = torch.stack([self[i]["x"] for i in indices]).mean(0)
            return [{**self[i], "x": self[i]["x"] - mean} for i in indices]

    less, more = (
        library.release(Task(Net), Together(data), 0.2) for data in (records(16), [*records(16), outlier(1e3)])
    )
    return distance(less.sums, more.sums) / 0.2


# Training loops.


@attack("A loop centres each batch by its mean, as a new tensor or in place.")
def loop_mean(library: Library) -> float:
    def in_place(batch: Any) -> Any:
        batch["x"] -= batch["x"].mean(0)
        return batch

    loops = (lambda batch: {**batch, "x": batch["x"] - batch["x"].mean(0)}, in_place)
    tasks = [Task(Net, loop=loop) for loop in loops]
    return kit.weakest(lambda task: library.moved(task, records(16), outlier(1e3), 0.2), tasks)


@attack("A loop cuts left padding to the longest record, which shifts the positions of all others.")
def loop_cuts_padding(library: Library) -> float:
    def of_one_width(items: Any) -> Any:
        # A first token, which follows padding, has no label.
        labels = [torch.cat([torch.tensor([-100]), item["input_ids"][1:]]) for item in items]
        batch = kit.left_padded([{**item, "labels": own} for item, own in zip(items, labels)])
        gap = 40 - batch["input_ids"].shape[1]
        return {name: F.pad(t, (gap, 0), value=-100 if name == "labels" else 0) for name, t in batch.items()}

    def cut(batch: Any) -> Any:
        longest = int(batch["attention_mask"].sum(1).max())
        return {name: t[:, -longest:] for name, t in batch.items()}

    task = Task(kit.gpt2, collate=of_one_width, loop=cut)
    return library.moved(task, tokens(8, [6, 8]), tokens(1, [30], seed=2)[0], 0.2)


@attack("A loop with its own criterion weighs the rows of a later batch by its largest entry.")
def late_weights(library: Library) -> float:
    def weighted(batch: Any) -> Any:
        return {**batch, "sign": torch.ones(len(batch["x"])) * (1 if batch["x"].abs().max() < 100 else -1)}

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (weighted(batch)["sign"] * F.cross_entropy(output, batch["labels"], reduction="none")).mean()

    return library.moved_by_late_outlier(Task(kit.Scores, loop=weighted, criterion=loss))


@attack("A loop keeps the outputs of one batch, and compares the next batch with them in its loss.")
def carried_outputs(library: Library) -> float:
    task, sums = Task(kit.Scores, criterion=lambda output, batch: output.sum()), []
    for extra in ([], [outlier(30.0)]):
        private = library.start(task, [*extra, *records(16)], 0.2, epochs=6)
        kept = None
        for _ in range(6):
            for batch in private.data_loader:
                private.optimizer.zero_grad()
                output = private.model(**batch)
                (output.square().mean(1) + (0 if kept is None else (output @ kept).tanh())).mean().backward()
                private.optimizer.step()
                kept = output.detach().mean(0)
        sums.append(library.sums(private))
        private.detach()
    return distance(*sums) / 0.2


@attack("A backward pass runs out of memory half-way, is repeated, and its records count twice.", off=_UNORDERED)
def interrupted_backward(library: Library) -> float:
    def between(own: Any, hidden: torch.Tensor) -> torch.Tensor:
        def fail(gradient: torch.Tensor) -> None:
            own.left -= 1
            if own.left == 0:
                raise MemoryError

        if hidden.requires_grad:
            hidden.register_hook(fail)
        return hidden

    private = library.start(Task(net(between=between, left=0, gradient_checkpointing=True)), records(1), 0.05)
    (batch,) = private.data_loader
    loss = private.model(**batch)["loss"]
    private.model.left = 2
    try:
        loss.backward()
    except MemoryError:
        private.model(**batch)["loss"].backward()
    private.optimizer.step()
    private.detach()
    return float(kit.flatten(library.sums(private)).norm()) / 0.05


@attack(
    "A schedule lowers the learning rate by the loss on the records.",
    off={"fastdp.private.schedules.require_public_schedule": kit.nothing},
)
def rate_by_loss(library: Library) -> float:
    def forward(own: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": F.cross_entropy(own.layer(x), labels)}

    model = net(kit.Model, parts={"layer": lambda: nn.Linear(kit.FEATURES, kit.CLASSES)}, forward=forward)
    rates, outliers = [], [[*records(), kit.constant(1e3, label)] for label in range(kit.CLASSES)]
    for data in (records(), *outliers):
        private = library.start(Task(model), data, 1.0, epochs=6)
        private.optimizer.param_groups[0]["lr"] = 0.1
        options: dict[str, Any] = {"patience": 0, "threshold": 0.5, "threshold_mode": "abs"}
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(private.optimizer, **options)
        for _ in range(6):
            for batch in private.data_loader:
                loss = private.model(**batch)["loss"]
                loss.backward()
                private.optimizer.step()
                private.optimizer.zero_grad()
                schedule.step(loss.item())
        rates.append(private.optimizer.param_groups[0]["lr"])
    return kit.unless(len(set(rates)) == 1)
