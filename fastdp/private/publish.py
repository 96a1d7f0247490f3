"""What leaves a run for others to use: weights with the card beside them, in a folder or on a model hub."""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

import fastdp.accounting as accounting


class Published(ABC):
    """A run whose model can be handed on."""

    model: torch.nn.Module

    @abstractmethod
    def card(self) -> accounting.Card:
        """What was bought."""

    def save_pretrained(self, folder: str | os.PathLike[str], **options: Any) -> Path:
        """Write model and card to a folder that others can use: weights, ``card.json``, ``card.md`` and ``README.md``.

        The README is a model card with metadata and a section on privacy, both written from the claim; it takes the place of
        what the model's own ``save_pretrained`` wrote there.

        Args:
            folder: where; made if it is missing.
            options: for the model's own ``save_pretrained``.

        Returns:
            The folder.

        Raises:
            ValueError: for a model without ``save_pretrained``.
        """
        save = getattr(self.model, "save_pretrained", None)
        if not callable(save):
            raise ValueError(
                f"{type(self.model).__name__} has no save_pretrained: save its state_dict, and card() beside it"
            )
        save(str(folder), **options)
        return self.card().save_beside(folder)

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload what `save_pretrained` writes, the card with it, to a model hub.

        Args:
            repo_id: the name on the hub, such as ``anna/notes``; made if it is missing.
            options: for ``HfApi.upload_folder``, as ``commit_message``.

        Returns:
            What the hub says of the upload.

        Raises:
            ValueError: as `save_pretrained`.
        """
        with tempfile.TemporaryDirectory() as folder:
            return upload(self.save_pretrained(folder), repo_id, **options)


def upload(folder: Path, repo_id: str, **options: Any) -> Any:
    """Upload a folder as a model's repository, which is made if it is missing; ``options`` are ``HfApi.upload_folder``'s."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
