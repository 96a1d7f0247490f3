"""The bottom on its way to the customer: its weights and the tokenizer in one safetensors file, and its config as JSON."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerBase

import fastdp.files as files
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.weights import named_digest
from fastdp.methods.blocks import MODEL_TYPES
from fastdp.methods.sap import Bottom, split_model
from fastdp.untrusted import load_pretrained, parse_json_object, quote

FILE = "bottom.safetensors"
_WEIGHTS, _TOKENIZER = "weights/", "tokenizer/"
#: Files of a tokenizer that travel; no other name is ever written on the customer's disk.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
#: Of a config's own keys those that do not travel: names and labels say nothing of a bottom, and layers are counted apart.
_UNSENT = {
    *("_name_or_path", "architectures", "id2label", "label2id", "model_type", "transformers_version"),
    *("n_layer", "num_hidden_layers"),
}


@dataclass(frozen=True)
class PackedBottom:
    """A bottom in a file.

    Attributes:
        path: of the file.
        config: the transformers config, as JSON.
        digest: SHA-256 of the weights and of the tokenizer's files, in hex.
    """

    path: Path
    config: str
    digest: str


def pack_bottom(bottom: Bottom, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> PackedBottom:
    """Write the bottom and the tokenizer to ``folder``, in one piece."""
    tensors = {_WEIGHTS + name: value.detach().cpu().contiguous() for name, value in bottom.state_dict().items()}
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as place:
            tokenizer.save_pretrained(place)
            for file in filter(Path.exists, (Path(place) / name for name in _FILES)):
                tensors[_TOKENIZER + file.name] = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    path = folder / FILE
    files.save_tensors(path, tensors)
    config: Any = bottom.model.config
    settings = json.loads(config.to_json_string(use_diff=True))
    kept = {key: settings[key] for key in _keys(config.model_type) & settings.keys()}
    return PackedBottom(path, canonical({"model_type": config.model_type, **kept}), named_digest(tensors))


def unpack_bottom(packed: PackedBottom, after: int) -> tuple[Bottom, PreTrainedTokenizerBase | None]:
    """The frozen bottom, and the tokenizer if there is one; its files are written beside the weights.

    Shapes are compared with those of the config before anything of their size is made.

    Raises:
        ValueError: for a file that is damaged, of another digest, or does not fit the config.
    """
    try:
        with safe_open(packed.path, "pt") as file:  # type: ignore[no-untyped-call]
            names = [name.removeprefix(_WEIGHTS) for name in file.keys() if name.startswith(_WEIGHTS)]  # noqa: SIM118
            shapes = {name: list(file.get_slice(_WEIGHTS + name).get_shape()) for name in names}
            with torch.device("meta"):
                expected = {
                    name: list(value.shape) for name, value in _build(packed.config, after).state_dict().items()
                }
            if shapes != expected:
                raise ValueError("its weights are not those of its config")
            weights = {name: file.get_tensor(_WEIGHTS + name) for name in names}
            texts = {name: file.get_tensor(_TOKENIZER + name) for name in _FILES if _TOKENIZER + name in file.keys()}  # noqa: SIM118
            named = {_WEIGHTS + name: value for name, value in weights.items()}
            if named_digest(named | {_TOKENIZER + name: value for name, value in texts.items()}) != packed.digest:
                raise ValueError("its weights or its tokenizer are not those that the vendor announced")
    except Exception as error:
        # Another's config may make transformers raise anything.
        raise ValueError(f"the bottom in {packed.path} cannot be used: {error}") from None
    bottom = _build(packed.config, after)
    bottom.load_state_dict(weights)
    return bottom.eval(), _tokenizer(texts, packed.path.parent / "tokenizer")


def _build(config: str, after: int) -> Bottom:
    """A bottom of random weights. Raises ValueError for a model type or a setting that is not known."""
    settings = parse_json_object(config)
    kind = settings.pop("model_type", None)
    if unknown := settings.keys() - _keys(kind):
        raise ValueError(f"its config has the setting {quote(min(unknown))}, which no {kind} model has")
    if isinstance(settings.get("layer_types"), list):
        settings["layer_types"] = settings["layer_types"][:after]
    made = AutoConfig.for_model(kind, num_hidden_layers=after, **settings)
    return split_model(AutoModel.from_config(made), after)[0]


def _keys(kind: Any) -> set[str]:
    """The settings of a model type that travel. Raises ValueError for one that cannot be split."""
    if kind not in MODEL_TYPES:
        raise ValueError(f"its model_type is {quote(kind)}: a bottom is of {', '.join(MODEL_TYPES)}")
    return set(AutoConfig.for_model(kind).to_dict()) - _UNSENT


def _tokenizer(texts: Mapping[str, Tensor], folder: Path) -> PreTrainedTokenizerBase | None:
    if not texts:
        return None
    files.make_folder(folder)
    for name, content in texts.items():
        files.write(folder / name, content.numpy().tobytes())
    return load_pretrained(AutoTokenizer, folder)
