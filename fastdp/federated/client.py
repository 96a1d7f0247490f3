"""The Flower ``ClientApp``: receives the global adapter, trains it on the client's perturbed texts, returns it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from typing import Any

import torch

from fastdp.federated.adapter import AdaptedModel
from fastdp.federated.config import FederatedConfig
from fastdp.federated.messages import Order, update_record
from fastdp.federated.policy import ClientRefusal, NodeSettingError, client_settings, node_settings
from fastdp.federated.site import Site
from fastdp.federated.wire import unpack_adapter

# After ours: `messages` says what to install where Flower is missing.
from flwr.app import Context, Message  # isort: skip
from flwr.clientapp import ClientApp  # isort: skip

log = logging.getLogger("flwr")
app = ClientApp()

MessageHandler = Callable[[Message, Context], Message]


def hide_private_errors(handler: MessageHandler) -> MessageHandler:
    """Let only `ClientRefusal` reach the server in words: another error's text may quote a private one.

    What is raised carries no cause either: in a simulation Flower sends the text of the whole chain.
    """

    @wraps(handler)
    def guarded(message: Message, context: Context) -> Message:
        try:
            return handler(message, context)
        except ClientRefusal as refusal:
            raise refusal from None
        except Exception as error:
            log.exception("this client failed; the server is told no more than the kind of error")
            raise RuntimeError(f"the client failed with {type(error).__name__}; its own log says more") from None

    return guarded


@app.train()
@hide_private_errors
def train(message: Message, context: Context) -> Message:
    node, order = node_settings(context.node_config), Order.from_record(message.content)
    config = _config(context.run_config, node)
    if not 0 < order.round_number <= config.rounds:
        raise ClientRefusal(f"the run has {config.rounds} rounds, and this one is no round of it: start another run")
    site = _site_of(config, int(node.get("partition-id", 0)), int(node.get("num-partitions", 1)))
    adapted = site.adapted
    if order.base != adapted.base:
        raise ClientRefusal("the server's base model is not this client's: both must load the same public model")
    try:
        adapted.adapter = unpack_adapter(order.adapter, adapted.adapter)
    except ValueError as error:
        raise ClientRefusal(f"the server's adapter is not this client's: {error}") from None
    fitted = site.fit(order.round_number)
    return Message(update_record(adapted.adapter, fitted), reply_to=message)


def _config(run: Mapping[str, Any], node: Mapping[str, Any]) -> FederatedConfig:
    try:
        return client_settings(run, node)
    except NodeSettingError:
        # It quotes the client's own settings: for its log, not for the server.
        raise
    except ValueError as error:
        # It quotes settings, which hold no text of the client's.
        raise ClientRefusal(str(error)) from None


# A process of a simulation serves many clients in many rounds: it loads the model once, and perturbs and encodes each
# client's texts once. One model serves all, since an order brings its adapter with it.
@lru_cache(maxsize=1)
def _adapted(config: FederatedConfig) -> AdaptedModel:
    if config.threads:
        torch.set_num_threads(config.threads)
    return AdaptedModel.load(config)


@lru_cache(maxsize=64)
def _site_of(config: FederatedConfig, index: int, clients: int) -> Site:
    return Site.of_partition(_adapted(config), index, clients)


def forget(*_: Any) -> None:
    """Drop what this process has loaded, as between two runs."""
    _site_of.cache_clear()
    _adapted.cache_clear()
