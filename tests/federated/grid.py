"""A stand-in for Flower's grid: each client is a function from a message to a reply, called in this process."""

import copy
import itertools
import json
import weakref
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.supercore.task_identity import TaskIdentity

from fastdp.federated import FederatedConfig, client
from fastdp.federated.server import Server


class LocalGrid:
    """Clients by node id; a reply of None is a client that stays away.

    Attributes:
        alive: most replies that were in memory at once.
        sent: (node, kind of message) in order.
    """

    def __init__(self, clients):
        # Flower's processes are told who they are; messages are stamped with it.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.clients = dict(clients)
        self.alive = 0
        self.sent = []
        self._ids = itertools.count()
        self._waiting = {}
        self._replies = weakref.WeakSet()

    def get_node_ids(self):
        return list(self.clients)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self._ids)}"
            self._waiting[message.metadata.message_id] = message
            self.sent.append((message.metadata.dst_node_id, message.metadata.message_type))
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        found = []
        for message_id in message_ids:
            message = self._waiting.pop(message_id, None)
            reply = None if message is None else self.clients[message.metadata.dst_node_id](message)
            if reply is not None:
                self._replies.add(reply)
                self.alive = max(self.alive, len(self._replies))
                found.append(reply)
        return found


def honest(settings, node):
    """The real client app with a node config."""

    def answer(message):
        context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=dict(settings))
        return client.app(message, context)

    return answer


def federation(settings, clients):
    """A grid of honest clients of a simulation, numbered from 100."""
    client.forget()
    nodes = ({"partition-id": index, "num-partitions": clients} for index in range(clients))
    return LocalGrid({100 + index: honest(settings, node) for index, node in enumerate(nodes)})


def run(settings, grid):
    """The server after a run, and the rows that it wrote."""
    server = Server(grid, FederatedConfig.read(settings))
    server.run()
    return server, rows_of(settings)


def rows_of(settings):
    return [json.loads(line) for line in (Path(settings["output"]) / "rounds.jsonl").read_text().splitlines()]


def tampering(answer, change):
    """A client whose reply ``change`` alters in place, or replaces."""

    def answered(message):
        reply = answer(message)
        return change(reply) or reply

    return answered


def replaying(content):
    """A client that answers with a copy of ``content``, trained before."""
    return lambda message: Message(copy.deepcopy(content), reply_to=message)


def failing(message, reason="out of battery"):
    """A client that reports an error."""
    return Message(Error(code=1, reason=reason), reply_to=message)


def reporting(answer):
    """What Flower makes of a client whose app raises: a reply that quotes the error."""

    def answered(message):
        try:
            return answer(message)
        except Exception as error:
            return failing(message, str(error))

    return answered
