"""The Flower ``ServerApp``: distributes the adapter, checks and averages what comes back, evaluates, and can be resumed."""

from __future__ import annotations

import logging
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

import fastdp.accounting as accounting
import fastdp.files as files
from fastdp.data import Examples
from fastdp.federated import reports
from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.aggregation import Aggregator, RefusedUpdate, UpdateBounds
from fastdp.federated.checkpoint import Checkpoint
from fastdp.federated.config import FederatedConfig
from fastdp.federated.messages import Order, read_update
from fastdp.federated.wire import pack_adapter
from fastdp.finetune.models import save_weights
from fastdp.locks import Lock
from fastdp.ops.stream import NoiseStream
from fastdp.untrusted import escape_controls, quote

# After ours: `messages` says what to install where Flower is missing.
from flwr.app import Context, Message, MessageType  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

#: Replies fetched at a time, so that memory does not grow with the number of clients.
_AT_ONCE = 4
_POLL_SECONDS = 0.1
_LONGEST_REASON = 300
#: A loss in nats beyond this is no measurement, and its exponential no number.
_LARGEST_LOSS = 700.0

log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that the run config asks for."""
    Server(grid, FederatedConfig.read(context.run_config)).run()


@dataclass
class Round:
    """One round's outcome, as it is reported."""

    number: int
    sampled: int
    accepted: int = 0
    missing: int = 0
    refused: list[dict[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self, perplexity: float | None, seconds: float, void: bool) -> dict[str, Any]:
        return {
            "round": self.number,
            "sampled": self.sampled,
            "accepted": self.accepted,
            "refused": self.refused,
            "missing": self.missing,
            "void": void,
            "perplexity": perplexity,
            "seconds": seconds,
            "client_seconds": _median(self.seconds) * len(self.seconds),
            "unprotected": {"loss": _median(self.losses) if self.losses else None},
        }


class Server:
    """The server of one run.

    Args:
        grid: Flower's connection to the clients.
        config: the run's settings.

    Raises:
        ValueError: for settings that do not fit what ``output`` holds.
    """

    def __init__(self, grid: Grid, config: FederatedConfig) -> None:
        self.grid, self.config = grid, config
        # Sampling and noise of central DP, by ChaCha20.
        self.stream = NoiseStream()
        self.output = Path(config.output)
        self._lock = Lock.of_folder(self.output)
        found = Checkpoint.load(self.output, config)
        self.adapted = AdaptedModel.load(config)
        self.rows: list[dict[str, Any]] = []
        self.population = 0
        if found is not None:
            self.rows, self.population = found.rows, found.population
            self.adapted.adapter = found.adapter
        self.ledger = self._open_ledger(found) if config.central else None
        self.held_out: Examples | None = None
        if config.evaluation == "server":
            self.held_out = self.adapted.examples(self.adapted.encode(self.adapted.texts(config.eval)))

    def run(self) -> None:
        """Run the remaining rounds, each followed by a checkpoint; then write adapter, cards and picture.

        Raises:
            ValueError: if fewer clients connect than a round needs; the checkpoint stays, to resume from.
        """
        try:
            for number in range(len(self.rows) + 1, self.config.rounds + 1):
                if self.ledger is not None and not self.ledger.remaining():
                    log.warning("the budget of %d releases is spent: the run ends here", self.ledger.budget_steps)
                    break
                self._play(number)
            self._finish()
        finally:
            if self.ledger is not None:
                self.ledger.close()
            self._lock.close()

    def _play(self, number: int) -> None:
        begin = time.perf_counter()
        nodes = self._connected()
        self._begin(len(nodes))
        chosen = self._sample(nodes)
        played = Round(number, len(chosen))
        aggregator = self._gather(played, chosen)
        adapter = self._release(aggregator)
        if adapter is not None:
            self.adapted.adapter = adapter
        played.accepted = aggregator.accepted
        perplexity = None if self.held_out is None else self.adapted.quality(self.held_out).perplexity
        seconds = time.perf_counter() - begin
        self.rows.append(played.row(perplexity, seconds, void=adapter is None))
        head = None if self.ledger is None else self.ledger.head
        Checkpoint(self.adapted.adapter, self.population, self.rows, head).save(self.output, self.config)
        files.write_rows(self.output / reports.ROUNDS_FILE, self.rows)
        shown = "not measured" if perplexity is None else f"{perplexity:.2f}"
        log.info("round %d: %d of %d accepted, perplexity %s", number, played.accepted, played.sampled, shown)

    def _begin(self, clients: int) -> None:
        """At the first round: the number of clients that central DP counts on, however many come later."""
        if self.population:
            return
        self.population = clients
        if self.config.central and self.config.client_delta >= 1 / clients:
            log.warning(
                "client_delta %g is not below 1/clients = %.3g: it would allow publishing a whole client",
                self.config.client_delta,
                1 / clients,
            )

    def _connected(self) -> list[int]:
        """Nodes that are there, waiting for enough of them."""
        end = time.monotonic() + self.config.wait_seconds
        while len(nodes := list(self.grid.get_node_ids())) < self.config.min_clients:
            if time.monotonic() > end:
                raise ValueError(
                    f"{len(nodes)} clients are connected after {self.config.wait_seconds:g} s, but a round needs "
                    f"{self.config.min_clients}: connect more, or lower min_clients"
                )
            time.sleep(_POLL_SECONDS)
        return nodes

    def _sample(self, nodes: Sequence[int]) -> list[int]:
        if self.config.central:
            # Each client independently, as the accountant assumes; who was drawn stays with the server.
            drawn = self.stream.bernoulli(len(nodes), self.config.fraction).tolist()
            return [node for node, taken in zip(nodes, drawn) if taken]
        wanted = max(self.config.min_clients, math.ceil(self.config.fraction * len(nodes)))
        return random.SystemRandom().sample(list(nodes), wanted)

    def _gather(self, played: Round, chosen: Sequence[int]) -> Aggregator:
        config = self.config
        aggregator = Aggregator(
            self.adapted.adapter,
            UpdateBounds(config.max_update_norm, config.max_examples),
            weighted=config.aggregation == "examples",
            clip=config.client_clip if config.central else None,
        )
        for node, reply in self._exchange(chosen, played.number):
            if reply is None:
                played.missing += 1
                log.warning("client %d did not answer in round %d", node, played.number)
                continue
            try:
                self._add(aggregator, played, reply)
            except RefusedUpdate as refusal:
                reason = escape_controls(str(refusal)[:_LONGEST_REASON])
                played.refused.append({"client": str(node), "reason": reason})
                log.warning("update of client %d refused: %s", node, reason)
        return aggregator

    def _add(self, aggregator: Aggregator, played: Round, reply: Message) -> None:
        if reply.has_error():
            raise RefusedUpdate(f"it reports an error: {quote(reply.error.reason, _LONGEST_REASON)}")
        try:
            data, examples, metrics = read_update(reply.content)
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedUpdate(f"it is no update: {quote(str(error))}") from None
        except Exception as error:
            raise RefusedUpdate(f"it is no update: {type(error).__name__}") from error
        aggregator.add(data, examples)
        for name, found, most in (
            ("loss", played.losses, _LARGEST_LOSS),
            ("seconds", played.seconds, self.config.round_seconds),
        ):
            if 0 <= metrics.get(name, -1.0) <= most:
                found.append(metrics[name])

    def _release(self, aggregator: Aggregator) -> dict[str, Tensor] | None:
        """The new global adapter, or None if the round changes nothing."""
        if self.ledger is not None:
            # Released whoever took part: not to release would tell how many did.
            self.ledger.record()
            expected = self.config.fraction * self.population
            return aggregator.noisy_mean(self.config.client_noise_multiplier, expected, self.stream)
        if aggregator.accepted < self.config.min_clients:
            return None
        return aggregator.mean()

    def _exchange(self, nodes: Sequence[int], number: int) -> Iterator[tuple[int, Message | None]]:
        """Send the adapter to ``nodes`` and yield their replies as they come; None for those that stay away."""
        content = Order(pack_adapter(self.adapted.adapter), number, self.adapted.base).to_record()
        seconds = self.config.round_seconds
        waiting: dict[str, int] = {}
        for node in nodes:
            message = Message(content, node, MessageType.TRAIN, ttl=seconds)
            message_id = next(iter(self.grid.push_messages([message])), None)
            if message_id is None:
                yield node, None
            else:
                waiting[message_id] = node
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            ids = iter(list(waiting))
            while group := list(islice(ids, _AT_ONCE)):
                for reply in self.grid.pull_messages(group):
                    if reply.metadata.reply_to_message_id in waiting:
                        yield waiting.pop(reply.metadata.reply_to_message_id), reply
            time.sleep(_POLL_SECONDS if waiting else 0)
        for node in waiting.values():
            yield node, None

    def _open_ledger(self, found: Checkpoint | None) -> accounting.Ledger:
        config = self.config
        path = self.output / "ledger.jsonl"
        ledger = accounting.Ledger.open_or_create(
            path,
            {"unit": "client", "adjacency": "add_remove", "client_clip": config.client_clip},
            event=accounting.dpsgd_model(config.client_noise_multiplier, config.fraction),
            budget_steps=config.rounds,
            # Killed before its first round, it goes on with the ledger alone; a checkpoint without one does not.
            resume=found is not None or (config.resume and path.exists()),
            block=1,
        )
        try:
            if found is not None:
                ledger.restore(len(found.rows), found.ledger_head)
            if config.rounds > ledger.budget_steps:
                ledger.extend(config.rounds)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def _finish(self) -> None:
        folder = save_weights(self.adapted.model, self.adapted.tokenizer, self.output)
        weights = list(self.adapted.adapter.values())
        card = reports.run_card(self.config, self.rows, self.population, weights)
        card.of_files(folder).save(self.output / reports.CARD)
        if self.ledger is not None:
            card = reports.central_card(self.config, self.ledger, self.population, weights)
            card.of_files(folder).save(self.output / "card")


def _median(values: Sequence[float]) -> float:
    """The median of figures that clients report, which fewer than half of them cannot set; 0 of none."""
    return statistics.median(values) if values else 0.0
