"""What a public table and a tokenizer say of the tokens: which there are, which stay, which one stands for unknown words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastdp.methods.encoding import role_ids
from fastdp.validate import instance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def table_of(given: Tensor | nn.Module) -> Tensor:
    """The embedding table as float32 [V, d], of a table or of a model's input embeddings. Raises ValueError for another."""
    table: Any = given
    if isinstance(given, nn.Module):
        embeddings: Any = getattr(given, "get_input_embeddings", lambda: None)()
        if embeddings is None:
            raise ValueError(f"{type(given).__name__} has no input embeddings: give their table")
        table = embeddings.weight
    instance(Tensor, "a tensor [V, d], or a model", table_or_model=table)
    if table.dim() != 2 or not table.is_floating_point():
        raise ValueError(f"the table is {table.dtype} {list(table.shape)}: it must be rows of floats, [V, d]")
    return table.detach().float()


def unknown_id_of(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """The token that stands for unknown words, if the tokenizer has one."""
    if tokenizer is None:
        return None
    # Byte-level vocabularies know every word, and name a token of another role here.
    others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    return None if tokenizer.unk_token_id in others else tokenizer.unk_token_id


def kept_tokens(
    size: int, tokenizer: PreTrainedTokenizerBase | None, special_ids: Sequence[int], unknown_id: int | None
) -> Tensor:
    """Which tokens stay wherever an encoder puts them, bool [V]: those of a role, and ``special_ids``; never the unknown one."""
    # A closed list of roles: what else a tokenizer calls special may be any word that its maker wants to see.
    roles = () if tokenizer is None else role_ids(tokenizer).values()
    kept = torch.zeros(size, dtype=torch.bool)
    for token in {*map(int, special_ids), *roles} - {unknown_id}:
        if not 0 <= token < size:
            raise ValueError(f"special token {token} is outside the table of {size} rows")
        kept[token] = True
    return kept


def decodable_ids(size: int, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Rows beyond the vocabulary, as tables of round sizes have, stand for no token."""
    return torch.arange(size) < (size if tokenizer is None else len(tokenizer))


def check_rows(rows: Tensor, ids: Tensor, duplicates: str) -> None:
    """Raise ValueError for rows that are not finite, and unless ``duplicates`` is ``merge``, for equal ones."""
    bad = (~torch.isfinite(rows).all(1)).nonzero()
    if len(bad):
        raise ValueError(f"the table's row of token {int(ids[bad[0]])} holds a NaN or an infinity")
    if duplicates == "merge":
        return
    # A sum of 64-bit products tells rows apart; only those that share one are compared. 0 is added for the sake of -0.
    weights = torch.randint(1, 1 << 62, (rows.shape[1],), generator=torch.Generator().manual_seed(0))
    keys = ((rows + 0.0).view(torch.int32).long() * weights.to(rows.device)).sum(1)
    order = keys.argsort(stable=True)
    same = (keys[order][1:] == keys[order][:-1]).nonzero().flatten()
    for at in same.tolist():
        a, b = int(order[at]), int(order[at + 1])
        if torch.equal(rows[a], rows[b]):
            raise ValueError(
                f"tokens {int(ids[a])} and {int(ids[b])} have equal rows, so neither can be told from the other: pass "
                "duplicates='merge' to let them answer for one another"
            )
