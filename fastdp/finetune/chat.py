"""Conversations as examples: rendered by the tokenizer's chat template, with a loss on the assistant's turns alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastdp.data import IGNORED, Examples
from fastdp.tables import DataError, Rows, as_text
from fastdp.untrusted import ChatTemplate, encode, quote

ChatTurn = dict[str, Any]


def chat_examples(tokenizer: PreTrainedTokenizerBase, table: Rows, column: str, max_length: int) -> Examples:
    """Examples of conversations: what the template makes of them, up to the last assistant turn.

    An example that is longer than ``max_length`` loses its beginning, so that the last answer is learned.

    Raises:
        DataError: for a row that holds no conversation, or one that the template cannot render turn by turn.
        ValueError: for a tokenizer without a chat template, or one that cannot say where in the text its tokens are.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "its tokenizer has no chat template: put a chat_template.jinja beside it, or name text columns"
        )
    if not tokenizer.is_fast:
        raise ValueError("its tokenizer cannot say to which turn a token belongs: a tokenizer.json is needed")
    items, truncated = [], 0
    with ChatTemplate(tokenizer) as template:
        for index, value in enumerate(table.values(column, "messages_column")):
            try:
                text, spans = _render(template, conversation(value), "tool_calls" in str(tokenizer.chat_template))
            except ValueError as error:
                raise DataError(f"{table.place(index)}: column {column!r} (messages_column): {error}") from None
            encoded = encode(tokenizer, text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = encoded["input_ids"]
            learned = [any(start < end <= stop for start, stop in spans) for _, end in encoded["offset_mapping"]]
            labels = [token if own else IGNORED for token, own in zip(ids, learned)]
            truncated += len(ids) > max_length
            items.append({"input_ids": ids[-max_length:], "labels": labels[-max_length:]})
    return Examples(items, truncated)


def conversation(value: Any) -> list[ChatTurn]:
    """The turns of a row, each with a role and with text.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(value, list) or not value or not all(isinstance(turn, Mapping) for turn in value):
        raise ValueError("it holds no list of {role, content}")
    return [_turn(turn, number) for number, turn in enumerate(value, start=1)]


def conversation_text(value: Any) -> str:
    """All that is said in a conversation, turn after turn."""
    return "\n".join(turn["content"] for turn in conversation(value))


def _turn(turn: Mapping[str, Any], number: int) -> ChatTurn:
    # Arrow tables hold every field of any turn, with nothing in most.
    said = {key: value for key, value in turn.items() if value is not None}
    if not isinstance(said.get("role"), str):
        raise ValueError(f"turn {number} has no role: write role and content")
    content = said.get("content", "")
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise ValueError(f"turn {number} holds more than text: take pictures and sounds out")
        content = "".join(as_text(part.get("text")) for part in parts)
    if "content" not in said and "tool_calls" not in said:
        raise ValueError(f"turn {number} says nothing: write role and content")
    try:
        return {**said, "content": as_text(content)}
    except ValueError as error:
        raise ValueError(f"turn {number} holds {error}") from None


def _render(template: ChatTemplate, turns: list[ChatTurn], knows_tools: bool) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation up to its last answer, and where each answer begins and ends in it."""
    if not knows_tools:
        turns = [_spelled_out(turn) for turn in turns]
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise ValueError("no turn is the assistant's, so there is nothing to learn: leave the row out")

    def rendered(count: int, ask: bool = False) -> str:
        return template.render(turns[:count], ask=ask)

    text = rendered(answers[-1] + 1)
    spans, so_far = [], ""
    for number in range(answers[-1] + 1):
        end = rendered(number + 1)
        if not text.startswith(end) or len(end) <= len(so_far):
            raise ValueError(
                f"the chat template leaves out or rewrites turn {number + 1} ({quote(turns[number]['role'])}): cut the "
                "conversation there, or use another template"
            )
        if number in answers:
            asked = rendered(number, ask=True) if number else ""
            spans.append((len(asked) if text.startswith(asked) else len(so_far), len(end)))
        so_far = end
    return text, spans


def _spelled_out(turn: ChatTurn) -> ChatTurn:
    """A turn whose calls of tools are text, for templates that know none."""
    if "tool_calls" not in turn:
        return turn
    calls = json.dumps(turn["tool_calls"], default=str)
    rest = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(filter(None, (turn["content"], calls)))}
