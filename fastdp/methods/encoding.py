"""The one encoder of private text: whatever a text spells out means its letters, and what the encoder adds is marked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fastdp.accounting.serialisation import canonical
from fastdp.untrusted import encode

#: The roles whose tokens an encoder puts around every text alike. A tokenizer may call any word special besides; where such
#: a word stands in a text it is text.
ROLES = ("bos_token", "eos_token", "cls_token", "sep_token", "pad_token", "mask_token")
ADDED = "special_tokens_mask"


def encode_private(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, special: bool = False, **options: Any
) -> dict[str, list[list[Any]]]:
    """Token ids of private texts, with which of them the tokenizer added under ``special_tokens_mask``.

    A special token that a text spells out is encoded as the letters that it is written with: as the token itself it could be
    told from text, and a mechanism that leaves special tokens alone would let it leave in the clear.

    ``pairs`` are the second text of each example, and ``options`` further arguments of the tokenizer, such as ``truncation``.
    It adds its special tokens only if ``special`` is set. Returns what it returns, as lists; empty lists for no text.
    """
    if not texts:
        return {"input_ids": [], ADDED: []}
    arguments = (list(texts),) if pairs is None else (list(texts), list(pairs))
    found = encode(
        tokenizer,
        *arguments,
        add_special_tokens=special,
        split_special_tokens=True,
        return_special_tokens_mask=True,
        verbose=False,
        **options,
    )
    return dict(found)


def role_ids(tokenizer: Any) -> dict[str, int]:
    """The tokens of `ROLES` that a tokenizer has: role to id."""
    found = {role: getattr(tokenizer, f"{role}_id", None) for role in ROLES}
    return {role: int(token) for role, token in found.items() if token is not None}


def vocabulary_digest(tokenizer: Any) -> str:
    """SHA-256 of which token has which id, in hex: what two parties compare who use the same model."""
    return hashlib.sha256(canonical(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of all that decides how a tokenizer encodes, in hex; a slow one's code is not part of it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        parts: dict[str, Any] = {"class": type(tokenizer).__qualname__, "vocabulary": sorted(vocabulary.items())}
    else:
        # These two follow the arguments of the last call.
        parts = {key: v for key, v in json.loads(backend.to_str()).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(canonical([parts, role_ids(tokenizer)]).encode()).hexdigest()
