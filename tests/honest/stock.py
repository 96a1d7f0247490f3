"""Stock models of transformers in the loops of its example scripts."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from . import kit
from .custom import outside
from .harness import ROWS, Case, program, register_all


def build(prefix: str, head: str, base: dict[str, Any] = kit.SMALL, **options: Any) -> Any:
    """A small model of a class; None takes a setting away."""
    settings = {k: v for k, v in {**base, **options}.items() if v is not None}
    return getattr(hf, f"{prefix}{head}")(getattr(hf, f"{prefix}Config")(**settings))


_LABELS = {"num_labels": kit.CLASSES, "num_key_value_heads": None}
_DEBERTA = {**_LABELS, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
_HEAD_DIM = {"head_dim": 8}

#: Causal models, rows of varying length padded on the right.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", _HEAD_DIM),
    "phi3": ("Phi3", {}),
    "mamba": ("Mamba", {"state_size": 4}),
}
register_all(CAUSAL, lambda v: Case(build(v[0], "ForCausalLM", **v[1]), kit.id_rows(), kit.causal), "causal_")

#: Sequence classifiers, rows of varying length padded on the right.
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {**_LABELS, "embedding_size": 8}),
    "modernbert": ("ModernBert", {**_LABELS, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 4}),
    "deberta": ("DebertaV2", _DEBERTA),
    "deberta_single_label": ("DebertaV2", {**_DEBERTA, "problem_type": "single_label_classification"}),
    "gpt2": ("GPT2", {**_LABELS, **kit.GPT}),
}
register_all(
    CLASSIFIERS,
    lambda v: Case(build(v[0], "ForSequenceClassification", **v[1]), kit.labelled(), kit.classify),
    "classify_",
)


@program()
def classify_xlnet() -> Case:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**kit.causal(rows, left=True), "labels": torch.tensor([row["labels"] for row in rows])}

    sizes = {"d_model": kit.WIDTH, "n_layer": 1, "n_head": 2, "d_inner": 24, "max_position_embeddings": None}
    return Case(build("XLNet", "ForSequenceClassification", **_LABELS, **sizes), kit.labelled(), collate)


#: Encoder-decoder models.
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "m2m100": ("M2M100", "ForConditionalGeneration", kit.PAIR),
    "mt5": (
        "MT5",
        "ForConditionalGeneration",
        {**kit.SMALL, "d_model": kit.WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    ),
}
register_all(PAIRS, lambda v: Case(build(*v), kit.pair_rows(), kit.translate), "translate_")


#: Image classifiers without batch statistics.
_STAGES = {"num_attention_heads": None, "num_hidden_layers": None, "hidden_size": None}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "swinv2": ("Swinv2", {**_STAGES, "depths": [1, 1], "num_heads": [2, 2], "embed_dim": 8, "window_size": 2}),
    "convnext": ("ConvNext", {**_STAGES, "patch_size": 2, "hidden_sizes": [8, 8, 8, 16], "depths": [1] * 4}),
}
_VISION = {k: kit.SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
_PICTURED = {**_VISION, **kit.IMAGE}
register_all(
    VISION,
    lambda v: Case(build(v[0], "ForImageClassification", _PICTURED, **v[1]), kit.images(), kit.pictures),
    "images_",
)


def left_padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Left padding; no padding token predicts a row's first token."""
    batch = kit.causal(rows, left=True)
    first = batch["attention_mask"].cumsum(1) == 1
    return {**batch, "labels": batch["labels"].masked_fill(first, -100)}


def left_with_positions(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Left padding whose position_ids begin at each row's first token."""
    batch = left_padded(rows)
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def masked_labels(model: Any, batch: Any) -> torch.Tensor:
    """The most common loop: copy the ids, and write -100 where the mask is 0."""
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    return model(**batch, labels=labels).loss


def masked_labels_no_mask(model: Any, batch: Any) -> torch.Tensor:
    """The same without handing the mask to the model."""
    labels = batch["input_ids"].clone()
    labels[batch["attention_mask"] == 0] = -100
    return model(input_ids=batch["input_ids"], labels=labels).loss


MODELS = {"gpt2": kit.gpt2, "llama": kit.llama}
register_all(
    MODELS, lambda v: Case(v(), kit.id_rows(), kit.unlabelled, masked_labels_no_mask), "labels_in_loop_no_mask_"
)


@program()
def labels_in_loop_t5() -> Case:
    """T5 whose targets come padded with 0; the loop writes -100."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**kit.unlabelled(rows), "targets": kit.padded([row["labels"] for row in rows])}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        labels = batch.pop("targets").clone()
        labels[labels == 0] = -100
        return model(**batch, labels=labels).loss

    return Case(kit.t5(), kit.pair_rows(), collate, loss)


@program("one-example or refused: pad", "scores of padding enter the softmax over positions")
def question_answering_dynamic_padding() -> Case:
    return Case(kit.bert("QuestionAnswering", num_labels=2), kit.labelled(), answers)


def answers(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Start and end positions."""
    starts = torch.tensor([row["labels"] for row in rows])
    return {**kit.unlabelled(rows), "start_positions": starts, "end_positions": starts + 1}


def heads(body: Any, hidden: int = 2) -> kit.Wrapped:
    """A head on the last two hidden states of a body."""

    def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        found = self.body(input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
        return {"loss": F.cross_entropy(self.head(torch.cat([found[-1][:, 0], found[-2][:, 0]], -1)), labels)}

    return kit.Wrapped(forward, body=body, head=nn.Linear(hidden * kit.WIDTH, kit.CLASSES))


def loss_key(model: Any, batch: Any) -> torch.Tensor:
    """Models that return a dictionary with the loss."""
    return model(**batch)["loss"]


@program()
def hidden_states_bert() -> Case:
    return Case(heads(kit.bert(None)), kit.labelled(), kit.classify, loss_key)


@program()
def llava() -> Case:
    """LLaVA: a picture and a text; the model selects hidden states of the vision tower."""
    vision = hf.CLIPVisionConfig(**{**_VISION, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8})
    places = {"image_token_id": 1, "image_token_index": 1, "image_seq_length": 4}
    selection = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**kit.SMALL), **places, **selection)
    rows = [
        {"input_ids": [2, 1, 1, 1, 1, *row["input_ids"]], "image": x}
        for row, (x, _) in zip(kit.id_rows(), kit.images())
    ]
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**kit.causal(rows), "pixel_values": torch.stack([row["image"] for row in rows])}

    return Case(hf.LlavaForConditionalGeneration(config), rows, collate)


@program("one-example", "the patches of all pictures are one tensor")
def qwen2_vl() -> Case:
    """Qwen2-VL: patches have no axis of rows, so that each example is collated by itself."""
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    text = {k: v for k, v in kit.SMALL.items() if k != "intermediate_size"}
    text |= {"intermediate_size": 24, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    places = {"image_token_id": 1, "vision_start_token_id": 94, "vision_end_token_id": 95, "video_token_id": 93}
    config = hf.Qwen2VLConfig(vision_config=vision, text_config=text, **places)
    draw = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": [94, *[1] * 4, 95, *row["input_ids"]], "patches": torch.randn(16, 96, generator=draw)}
        for row in kit.id_rows()
    ]
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        made = kit.causal(rows)
        made["pixel_values"] = torch.cat([row["patches"] for row in rows])
        made["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(rows))
        return {**made, "mm_token_type_ids": (made["input_ids"] == 1).int()}

    return Case(hf.Qwen2VLForConditionalGeneration(config), rows, collate)


@program()
def checkpointing() -> Case:
    model = kit.llama()
    model.gradient_checkpointing_enable()
    return Case(model, kit.id_rows(), kit.causal)


@program()
def checkpointing_reentrant() -> Case:
    model = kit.bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return Case(model, kit.labelled(), kit.classify)


@program()
def autocast_bfloat16_outside() -> Case:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(batch[0]), batch[1])

    return outside(kit.mlp(), kit.numbers(), loss=loss, exact=False)


class _Cast(nn.Module):
    """A model whose own forward pass casts, as accelerate wraps it and torch's page on several GPUs has it."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@program()
def autocast_in_forward() -> Case:
    wide = kit.bert(hidden_size=256, intermediate_size=512)
    return Case(_Cast(wide), kit.labelled(high=40), kit.classify, exact=False)


@program()
def autocast_in_forward_outside() -> Case:
    loss = lambda m, b: F.cross_entropy(m(b[0]).float(), b[1])  # noqa: E731
    return outside(_Cast(kit.mlp()), kit.numbers(), loss=loss, exact=False)


def speech(head: str, label: Any, **options: Any) -> Case:
    """A small wav2vec2 on noise; CTC pads sounds and labels."""
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    sizes = {
        **_VISION,
        "vocab_size": 32,
        "pad_token_id": 0,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    }
    norm = {"feat_extract_norm": "layer", "do_stable_layer_norm": True, "conv_bias": True, "classifier_proj_size": 8}
    config = hf.Wav2Vec2Config(**{**sizes, **layers, **norm, "ctc_loss_reduction": "mean", **options})
    ctc = head == "ForCTC"
    rows = [
        (torch.randn(240 + 10 * (n % 4) * ctc, generator=torch.Generator().manual_seed(n)), label(n))
        for n in range(ROWS)
    ]

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        mask = kit.padded([torch.ones(len(x), dtype=torch.long) for x, _ in rows])
        return {
            "input_values": kit.padded([x for x, _ in rows]),
            "attention_mask": mask,
            "labels": torch.tensor([y for _, y in rows]),
        }

    return Case(getattr(hf, f"Wav2Vec2{head}")(config), rows, collate, exact=False)


@program("one-example", "the loss divides by a count of patches over the batch")
def image_autoencoder_mae() -> Case:
    decoder = {f"decoder_{k}": v for k, v in _VISION.items()}
    config = hf.ViTMAEConfig(**_VISION, **decoder, image_size=16, patch_size=4)
    rows = [{"pixel_values": x} for x, _ in kit.images()]
    return Case(hf.ViTMAEForPreTraining(config), rows, None, exact=False)


@program("one-example", "the loss divides by a count of observed values over the batch")
def time_series_with_gaps() -> Case:
    """A forecaster whose masks are floats, as gluonts makes them."""
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "lags_sequence": [1, 2]}
    config = hf.TimeSeriesTransformerConfig(prediction_length=2, context_length=6, num_time_features=1, **sizes)
    model = hf.TimeSeriesTransformerForPrediction(config)
    model.model.scaler.default_scale = 1.0
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(ROWS):
        row = {}
        for name, length in (("past", 8), ("future", 2)):
            seen = torch.ones(length)
            seen[0] = float(number % 2)
            features = torch.rand(length, 1, generator=generator)
            row |= {f"{name}_values": torch.rand(length, generator=generator), f"{name}_time_features": features}
            row[f"{name}_observed_mask"] = seen
        rows.append(row)
    return Case(model, rows)


@program()
def mixture_of_many_experts() -> Case:
    return _mixture("Qwen3Moe", num_experts=8, moe_intermediate_size=8, **_HEAD_DIM)


@program()
def mixture_of_experts_with_biases() -> Case:
    return _mixture("GptOss", num_local_experts=4, **_HEAD_DIM)


@program()
def mixture_as_a_loop() -> Case:
    """Mixtral with experts_implementation="eager", a loop over the experts that have tokens."""
    case = _mixture("Mixtral", num_local_experts=4)
    case.model.set_experts_implementation("eager")
    case.exact = True
    return case


def _mixture(kind: str, **experts: Any) -> Case:
    # Torch's grouped product has no float64.
    return Case(build(kind, "ForCausalLM", num_experts_per_tok=2, **experts), kit.id_rows(), kit.causal, exact=False)


def packing(rows: list[Any]) -> dict[str, torch.Tensor]:
    """All examples in one row without padding, with a map of the tokens' examples."""
    parts = [row["input_ids"] for row in rows]
    positions = [n for part in parts for n in range(len(part))]
    labels = [token if n else -100 for part in parts for n, token in enumerate(part)]
    units = [number for number, part in enumerate(parts) for _ in part]
    flat = {"input_ids": sum(parts, []), "position_ids": positions, "labels": labels, "units": units}
    return {name: torch.tensor([value]) for name, value in flat.items()}


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "labels_in_loop_llama": lambda: Case(kit.llama(), kit.id_rows(), kit.unlabelled, masked_labels),
    "clm_left_padding_relative_positions": lambda: Case(kit.llama(), kit.id_rows(), left_padded),
    "clm_left_padding_position_ids": lambda: Case(kit.gpt2(), kit.id_rows(), left_with_positions),
    "labels_in_loop_masked_model": lambda: Case(kit.bert("MaskedLM"), kit.id_rows(), kit.unlabelled, masked_labels),
    "glue_regression": lambda: Case(
        kit.bert(num_labels=1), [{**row, "labels": float(row["labels"])} for row in kit.labelled()], kit.classify
    ),
    "multi_label": lambda: Case(
        kit.bert(problem_type="multi_label_classification"),
        [{**row, "labels": [1.0, 0.0, float(row["labels"] % 2)]} for row in kit.labelled()],
        kit.classify,
    ),
    "question_answering": lambda: Case(
        kit.bert("QuestionAnswering", num_labels=2),
        [{**row, "labels": number % 6} for number, row in enumerate(kit.id_rows(low=10, high=10))],
        answers,
    ),
    "bfloat16_model": lambda: Case(kit.llama().to(torch.bfloat16), kit.id_rows(), kit.causal, exact=False),
    "wav2vec2_spec_augment": lambda: speech(
        "ForCTC", lambda n: [random.Random(n).randrange(1, 31) for _ in range(4)], mask_time_length=2
    ),
    "wav2vec2_classification": lambda: speech(
        "ForSequenceClassification", lambda n: n % kit.CLASSES, mask_time_length=2, num_labels=kit.CLASSES
    ),
    "packed_rows": lambda: Case(kit.llama(use_cache=False), kit.id_rows(), packing, options={"unit_map": "units"}),
    "physical_batches": lambda: Case(kit.gpt2(), kit.id_rows(), kit.causal, options={"max_physical_batch_size": 3}),
}
register_all(ONE_LINE, lambda build: build())
