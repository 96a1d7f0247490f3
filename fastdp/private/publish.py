"""Upload what a run saved to a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def upload_to_hub(folder: Path, repo_id: str, **options: Any) -> Any:
    """Upload a folder as a model's repository, which is made if it is missing; ``options`` are ``HfApi.upload_folder``'s."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo_id, exist_ok=True)
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)
