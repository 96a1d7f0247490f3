"""The bottom on its way to the customer: its weights in one safetensors file, and its config as JSON.

No tokenizer travels. Another party's could map chosen words to chosen lengths or tokens, before any noise is drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModel

import fastdp.files as files
from fastdp.accounting.serialisation import canonical
from fastdp.accounting.weights import named_digest
from fastdp.methods.blocks import MODEL_TYPES
from fastdp.methods.sap import Bottom, split_model
from fastdp.untrusted import MAX_YAML, check_config, parse_json_object, quote, read_bytes

FILE = "bottom.safetensors"
#: Most bytes of the tables that building a bottom allocates, such as rotary ones, whose size only its config says.
_MAX_BUFFER_BYTES = 1 << 29
#: Settings that are not sent: names and labels do not change a bottom, and its number of blocks is a field of the message.
_LOCAL_SETTINGS = {
    *("_name_or_path", "architectures", "auto_map", "id2label", "label2id", "model_type", "transformers_version"),
    *("n_layer", "num_hidden_layers"),
}


@dataclass(frozen=True)
class PackedBottom:
    """A bottom in a file.

    Attributes:
        path: of the file.
        config: the transformers config, as JSON.
        digest: SHA-256 of the weights, in hex.
    """

    path: Path
    config: str
    digest: str


def pack_bottom(bottom: Bottom, folder: Path) -> PackedBottom:
    """Write the bottom's file to ``folder``: the whole of it, or nothing."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in bottom.state_dict().items()}
    path = folder / FILE
    files.save_tensors(path, tensors)
    config: Any = bottom.model.config
    settings = json.loads(config.to_json_string(use_diff=True))
    kept = {key: settings[key] for key in _sent_settings(config.model_type) & settings.keys()}
    return PackedBottom(path, canonical({"model_type": config.model_type, **kept}), named_digest(tensors))


def unpack_bottom(packed: PackedBottom, after: int) -> Bottom:
    """The frozen bottom. Shapes are compared with those of the config before anything of their size is made.

    Raises:
        ValueError: for a file that is damaged, of another digest, or does not fit the config.
    """
    try:
        with safe_open(packed.path, "pt") as file:  # type: ignore[no-untyped-call]
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            with torch.device("meta"):
                empty = _build(packed.config, after)
            expected = {name: list(value.shape) for name, value in empty.state_dict().items()}
            if sum(buffer.nbytes for buffer in empty.buffers()) > _MAX_BUFFER_BYTES:
                raise ValueError(f"its config asks for tables of more than {_MAX_BUFFER_BYTES} bytes")
            if shapes != expected:
                raise ValueError("its weights are not those of its config")
            weights = {name: file.get_tensor(name) for name in shapes}
            if named_digest(weights) != packed.digest:
                raise ValueError("its weights are not those that the vendor announced")
            if not all(bool(torch.isfinite(value).all()) for value in weights.values()):
                raise ValueError("its weights hold a NaN or an infinity, which no noise hides")
    except Exception as error:
        # The vendor's config is hostile input: transformers may raise any error for it.
        raise ValueError(f"the bottom in {packed.path} cannot be used: {error}") from None
    bottom = _build(packed.config, after)
    bottom.load_state_dict(weights)
    return bottom.eval()


def published_bottom(bottom: Bottom, after: int, folder: Path) -> Bottom:
    """The published model's bottom, if a vendor's has its weights, which may have longer names or another dtype in ``folder``.

    A made-up embedding table decides what a distance means, and could set chosen words so far apart that no noise hides them.
    So could a setting that multiplies rows, wherefore all settings are the published ones.

    Raises:
        ValueError: for weights that are not the published ones, and a folder that holds none, or no config.json.
    """
    missing = {name.removeprefix("model."): value.cpu() for name, value in bottom.state_dict().items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} holds no .safetensors file to compare the vendor's bottom with")
    for path in paths:
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            for name in file.keys():  # noqa: SIM118
                own = next((own for own in missing if name == own or name.endswith(f".{own}")), None)
                if own is not None and torch.equal(file.get_tensor(name).to(missing[own].dtype), missing[own]):
                    del missing[own]
    if missing:
        raise ValueError(
            f"the vendor's bottom is not the published model's in {folder} ({min(missing)}): do not use it, or omit published"
        )
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json: name the published model's folder")
    settings = parse_json_object(read_bytes(folder / "config.json", MAX_YAML))
    kind, weights = settings.get("model_type"), bottom.state_dict()
    kept = {key: settings[key] for key in (_sent_settings(kind) - {"dtype", "torch_dtype"}) & settings.keys()}
    found = _build(canonical({"model_type": kind, **kept}), after).to(next(iter(weights.values())).dtype)
    found.load_state_dict(weights)
    return found.eval()


def _build(config: str, after: int) -> Bottom:
    """A bottom of random weights. Raises ValueError for a model type or a setting that is not known."""
    settings = parse_json_object(config)
    kind = settings.pop("model_type", None)
    if unknown := settings.keys() - _sent_settings(kind):
        raise ValueError(f"its config has the setting {quote(min(unknown))}, which no {kind} model has")
    check_config(settings)
    if isinstance(settings.get("layer_types"), list):
        settings["layer_types"] = settings["layer_types"][:after]
    made = AutoConfig.for_model(kind, num_hidden_layers=after, **settings)
    return split_model(AutoModel.from_config(made), after)[0]


def _sent_settings(kind: Any) -> set[str]:
    """Names of the settings that are sent for a model type. Raises ValueError for one that cannot be split."""
    if kind not in MODEL_TYPES:
        raise ValueError(f"its model_type is {quote(kind)}: a bottom is of {', '.join(MODEL_TYPES)}")
    return set(AutoConfig.for_model(kind).to_dict()) - _LOCAL_SETTINGS
