"""What leaves a run for others to use: weights with the card beside them, in a folder or on a model hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fastdp.accounting import Card


def save_beside_card(
    model: torch.nn.Module, card: Callable[[], Card], folder: str | os.PathLike[str], **options: Any
) -> Path:
    """Write a model by its own ``save_pretrained``, and the card beside it; ValueError for a model without one."""
    save = getattr(model, "save_pretrained", None)
    if not callable(save):
        raise ValueError(f"{type(model).__name__} has no save_pretrained: save its state_dict, and card() beside it")
    save(str(folder), **options)
    return card().save_beside(folder)


def upload(folder: Path, repo_id: str, **options: Any) -> Any:
    """Upload a folder as a model's repository, which is made if it is missing; ``options`` are ``HfApi.upload_folder``'s."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
