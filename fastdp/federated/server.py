"""The Flower ``ServerApp``: distributes the adapter, checks and averages what comes back, evaluates, and can be resumed."""

from __future__ import annotations

import logging
import math
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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

# After our own modules: without Flower, importing `messages` says what to install.
import httpx  # isort: skip
from flwr.app import Context, Message, MessageType  # isort: skip
from flwr.serverapp import Grid, ServerApp  # isort: skip

_POLL_SECONDS = 0.1
#: How long others wait for a reply that was announced.
PULL_SECONDS = 2.0
_LONGEST_REASON = 300
#: A larger loss, in nats, is no measurement: its exponential overflows.
_LARGEST_LOSS = 700.0

log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that the run config asks for."""
    Server(grid, FederatedConfig.read(context.run_config)).run()


@dataclass
class Round:
    """One round's outcome: counts that the server made, and figures that clients report, unprotected and unchecked."""

    number: int
    sampled: int
    accepted: int = 0
    missing: int = 0
    refused: list[dict[str, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def row(self, perplexity: float | None, seconds: float, void: bool) -> dict[str, Any]:
        """The round's line in `ROUNDS_FILE`; a ``void`` round left the global adapter as it was."""
        return {
            "round": self.number,
            "sampled": self.sampled,
            "accepted": self.accepted,
            "refused": self.refused,
            "missing": self.missing,
            "void": void,
            "perplexity": perplexity,
            "seconds": seconds,
            # Not a sum, which one client's claim could set.
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
        """Run the remaining rounds, each followed by a checkpoint; then write the adapter and its cards.

        Raises:
            ValueError: if fewer clients connect than a round needs; the checkpoint stays, to resume from.
        """
        try:
            for number in range(len(self.rows) + 1, self.config.rounds + 1):
                if self.ledger is not None and not self.ledger.remaining():
                    log.warning("the budget of %d releases is spent: the run ends here", self.ledger.budget_steps)
                    break
                self._run_round(number)
            self._write_results()
        finally:
            if self.ledger is not None:
                self.ledger.close()
            self._lock.close()

    def _run_round(self, number: int) -> None:
        begin = time.perf_counter()
        nodes = self._wait_for_clients()
        self._fix_population(len(nodes))
        chosen = self._sample(nodes)
        outcome = Round(number, len(chosen))
        aggregator = self._gather(outcome, chosen)
        adapter = self._release(aggregator)
        if adapter is not None:
            self.adapted.adapter = adapter
        outcome.accepted = aggregator.accepted
        perplexity = None if self.held_out is None else self.adapted.quality(self.held_out).perplexity
        seconds = time.perf_counter() - begin
        self.rows.append(outcome.row(perplexity, seconds, void=adapter is None))
        head = None if self.ledger is None else self.ledger.head
        Checkpoint(self.adapted.adapter, self.population, self.rows, head).save(self.output, self.config)
        files.write_rows(self.output / reports.ROUNDS_FILE, self.rows)
        shown = "not measured" if perplexity is None else f"{perplexity:.2f}"
        log.info("round %d: %d of %d accepted, perplexity %s", number, outcome.accepted, outcome.sampled, shown)

    def _fix_population(self, clients: int) -> None:
        """Take the first round's number of clients for all rounds: central DP divides by it, however many come later."""
        if self.population:
            return
        self.population = clients
        if self.config.central and self.config.client_delta >= 1 / clients:
            log.warning(
                "client_delta %g is not below 1/clients = %.3g: it would allow publishing a whole client",
                self.config.client_delta,
                1 / clients,
            )

    def _wait_for_clients(self) -> list[int]:
        """The connected nodes, once a round has enough of them."""
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
            # Each client independently, as the accountant assumes, by draws that the server keeps secret.
            drawn = self.stream.bernoulli(len(nodes), self.config.fraction).tolist()
            return [node for node, taken in zip(nodes, drawn) if taken]
        wanted = max(self.config.min_clients, math.ceil(self.config.fraction * len(nodes)))
        return random.SystemRandom().sample(list(nodes), wanted)

    def _gather(self, outcome: Round, chosen: Sequence[int]) -> Aggregator:
        """Have the chosen clients train, and add up their updates."""
        config = self.config
        aggregator = Aggregator(
            self.adapted.adapter,
            UpdateBounds(config.max_update_norm, config.max_examples),
            weighted=config.aggregation == "examples",
            clip=config.client_clip if config.central else None,
        )
        for node, reply in self._exchange(chosen, outcome.number):
            if reply is None:
                outcome.missing += 1
                log.warning("client %d did not answer in round %d", node, outcome.number)
                continue
            try:
                self._add(aggregator, outcome, reply)
            except RefusedUpdate as refusal:
                reason = escape_controls(str(refusal)[:_LONGEST_REASON])
                outcome.refused.append({"client": str(node), "reason": reason})
                log.warning("update of client %d refused: %s", node, reason)
        return aggregator

    def _add(self, aggregator: Aggregator, outcome: Round, reply: Message | Exception) -> None:
        if isinstance(reply, Exception):
            if isinstance(reply, httpx.TransportError):
                raise reply
            raise RefusedUpdate(f"it cannot be read: {quote(reply, _LONGEST_REASON)}") from reply
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
            ("loss", outcome.losses, _LARGEST_LOSS),
            ("seconds", outcome.seconds, self.config.round_seconds),
        ):
            if 0 <= metrics.get(name, -1.0) <= most:
                found.append(metrics[name])

    def _release(self, aggregator: Aggregator) -> dict[str, Tensor] | None:
        """The new global adapter, or None if the round changes nothing."""
        if self.ledger is not None:
            # Even with few updates or none: a round left out would tell how many took part.
            self.ledger.record()
            expected = self.config.fraction * self.population
            return aggregator.noisy_mean(self.config.client_noise_multiplier, expected, self.stream)
        if aggregator.accepted < self.config.min_clients:
            return None
        return aggregator.mean()

    def _exchange(self, nodes: Sequence[int], number: int) -> Iterator[tuple[int, Message | Exception | None]]:
        """Send the adapter to ``nodes`` and yield their replies as they come.

        An error in the place of a reply that cannot be read, and None for a node without one in time.
        """
        content = Order(pack_adapter(self.adapted.adapter), number, self.adapted.base).to_record()
        seconds = self.config.round_seconds
        waiting: dict[str, int] = {}
        pulls: dict[str, _Pull] = {}
        for node in nodes:
            message = Message(content, node, MessageType.TRAIN, ttl=seconds)
            message_id = next(iter(self.grid.push_messages([message])), None)
            if message_id is None:
                yield node, None
            else:
                waiting[message_id] = node
        end = time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            # One at a time: memory does not grow with clients, and what one sends takes no other's reply with it.
            for message_id in list(waiting):
                pull = pulls.get(message_id) or _Pull(self.grid, message_id)
                pull.join(0 if message_id in pulls else min(PULL_SECONDS, seconds))
                if pull.is_alive():
                    pulls[message_id] = pull
                    continue
                pulls.pop(message_id, None)
                if pull.reply is not None:
                    yield waiting.pop(message_id), pull.reply
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
            # A run killed before its first checkpoint has a ledger alone. A checkpoint whose ledger is gone is refused.
            resume=found is not None or (config.resume and path.exists()),
            # A crash forfeits the rest of a block: here at most the one release of its round.
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

    def _write_results(self) -> None:
        folder = save_weights(self.adapted.model, self.adapted.tokenizer, self.output)
        weights = list(self.adapted.adapter.values())
        card = reports.run_card(self.config, self.rows, self.population, weights)
        card.of_files(folder).save(self.output / reports.CARD)
        if self.ledger is not None:
            card = reports.central_card(self.config, self.ledger, self.population, weights)
            card.of_files(folder).save(self.output / "card")


class _Pull(threading.Thread):
    """Fetches the reply to one message: a client that announces a reply, and sends nothing of it, delays no other.

    Attributes:
        reply: None while there is none; an error in the place of one that cannot be read.
    """

    def __init__(self, grid: Grid, message_id: str):
        super().__init__(daemon=True)
        self._grid, self._message_id = grid, message_id
        self.reply: Message | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for reply in self._grid.pull_messages([self._message_id]):
                if reply.metadata.reply_to_message_id == self._message_id:
                    self.reply = reply
        except Exception as error:
            # Flower reads a client's objects here, and raises whatever they make it raise.
            self.reply = error


def _median(values: Sequence[float]) -> float:
    """The median, which fewer than half of the clients cannot set; 0 of no figures."""
    return statistics.median(values) if values else 0.0
