"""Stock models of transformers in the loops of its example scripts."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from .harness import ROWS, Case, program, register
from .kit import (
    CLASSES,
    GPT,
    IMAGE,
    PAIR,
    SMALL,
    VOCABULARY,
    WIDTH,
    Wrapped,
    bert,
    causal,
    classify,
    gpt2,
    id_rows,
    images,
    keywords,
    labelled,
    llama,
    padded,
    pair_rows,
    pictures,
    t5,
    texts,
    tokenizer,
    translate,
    unlabelled,
)


def build(prefix: str, head: str, base: dict[str, Any] = SMALL, **options: Any) -> Any:
    """A small model of a class; None takes a setting away."""
    settings = {k: v for k, v in {**base, **options}.items() if v is not None}
    return getattr(hf, f"{prefix}{head}")(getattr(hf, f"{prefix}Config")(**settings))


_NO_KV = {"num_key_value_heads": None}
_LABELS = {"num_labels": CLASSES, "num_key_value_heads": None}
_DEBERTA = {**_LABELS, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}
_HEAD_DIM = {"head_dim": 8}

#: Causal models, rows of varying length padded on the right.
CAUSAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("Mistral", SMALL, {}),
    "qwen2": ("Qwen2", SMALL, {}),
    "qwen3": ("Qwen3", SMALL, _HEAD_DIM),
    "gemma2": ("Gemma2", SMALL, _HEAD_DIM),
    "phi3": ("Phi3", SMALL, {}),
    "olmo2": ("Olmo2", SMALL, {}),
    "smollm3": ("SmolLM3", SMALL, {}),
    "opt": ("OPT", SMALL, {"ffn_dim": 24, "word_embed_proj_dim": WIDTH}),
    "gpt_neox": ("GPTNeoX", SMALL, {}),
    "gptj": ("GPTJ", SMALL, {**GPT, "rotary_dim": 4}),
    "bloom": ("Bloom", SMALL, {"n_layer": 2, "n_head": 2}),
    "falcon": ("Falcon", SMALL, {}),
    "mamba": ("Mamba", SMALL, {"state_size": 4}),
}
for _name, (_prefix, _base, _options) in CAUSAL.items():
    _head = "ForCausalLM"
    register(
        f"causal_{_name}",
        lambda p=_prefix, b=_base, o=_options: Case(build(p, "ForCausalLM", b, **o), id_rows(), causal),
    )

#: Sequence classifiers, rows of varying length padded on the right.
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("Roberta", _LABELS),
    "distilbert": ("DistilBert", {**_LABELS, "dim": WIDTH, "hidden_dim": 24, "n_heads": 2, "n_layers": 2}),
    "electra": ("Electra", {**_LABELS, "embedding_size": WIDTH}),
    "albert": ("Albert", {**_LABELS, "embedding_size": 8}),
    "modernbert": ("ModernBert", {**_LABELS, "cls_token_id": 2, "sep_token_id": 3, "local_attention": 4}),
    "mpnet": ("MPNet", _LABELS),
    "deberta": ("DebertaV2", _DEBERTA),
    "deberta_single_label": ("DebertaV2", {**_DEBERTA, "problem_type": "single_label_classification"}),
    "gpt2": ("GPT2", {**_LABELS, **GPT}),
    "llama": ("Llama", {"num_labels": CLASSES}),
}
for _name, (_prefix, _options) in CLASSIFIERS.items():
    register(
        f"classify_{_name}",
        lambda p=_prefix, o=_options: Case(build(p, "ForSequenceClassification", **o), labelled(), classify),
    )


@program()
def classify_xlnet() -> Case:
    """XLNet, padded on the left as its tokenizer does."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**causal(rows, left=True), "labels": torch.tensor([row["labels"] for row in rows])}

    sizes = {"d_model": WIDTH, "n_layer": 1, "n_head": 2, "d_inner": 24, "max_position_embeddings": None}
    return Case(build("XLNet", "ForSequenceClassification", **_LABELS, **sizes), labelled(), collate)


#: Encoder-decoder models.
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("Bart", "ForConditionalGeneration", PAIR),
    "mbart": ("MBart", "ForConditionalGeneration", PAIR),
    "pegasus": ("Pegasus", "ForConditionalGeneration", PAIR),
    "marian": ("Marian", "MTModel", PAIR),
    "m2m100": ("M2M100", "ForConditionalGeneration", PAIR),
    "mt5": (
        "MT5",
        "ForConditionalGeneration",
        {**SMALL, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    ),
}
for _name, (_prefix, _head, _base) in PAIRS.items():
    register(f"translate_{_name}", lambda p=_prefix, h=_head, b=_base: Case(build(p, h, b), pair_rows(), translate))


#: Image classifiers without batch statistics.
_STAGES = {"num_attention_heads": None, "num_hidden_layers": None, "hidden_size": None}
VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}),
    "deit": ("DeiT", {}),
    "beit": ("Beit", {}),
    "dinov2": ("Dinov2", {}),
    "swin": ("Swin", {**_STAGES, "depths": [1, 1], "num_heads": [2, 2], "embed_dim": 8, "window_size": 2}),
    "convnext": ("ConvNext", {**_STAGES, "patch_size": 2, "hidden_sizes": [8, 8, 8, 16], "depths": [1] * 4}),
}
_VISION = {k: SMALL[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
for _name, (_prefix, _options) in VISION.items():
    register(
        f"images_{_name}",
        lambda p=_prefix, o=_options: Case(
            build(p, "ForImageClassification", {**_VISION, **IMAGE}, **o), images(), pictures
        ),
    )


@program()
def clm_blocks() -> Case:
    """run_clm: blocks of one length, default collator."""
    rows = [{**row, "labels": list(row["input_ids"])} for row in id_rows(low=16, high=16)]
    return Case(gpt2(), rows, hf.default_data_collator)


@program()
def clm_lines_language_modeling_collator() -> Case:
    """Lines of text through DataCollatorForLanguageModeling(mlm=False)."""
    rows = [dict(tokenizer(pair=False)(text)) for text in texts()]
    rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows]
    return Case(llama(), rows, hf.DataCollatorForLanguageModeling(tokenizer(pair=False), mlm=False))


def left_padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Left padding; no padding token predicts a row's first token."""
    batch = causal(rows, left=True)
    first = batch["attention_mask"].cumsum(1) == 1
    return {**batch, "labels": batch["labels"].masked_fill(first, -100)}


@program()
def clm_left_padding_relative_positions() -> Case:
    """Llama padded on the left: rotary positions are relative, so padding changes nothing."""
    return Case(llama(), id_rows(), left_padded)


def left_with_positions(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Left padding whose position_ids begin at each row's first token."""
    batch = left_padded(rows)
    return {**batch, "position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


@program()
def clm_left_padding_position_ids() -> Case:
    """GPT-2 padded on the left with position_ids."""
    return Case(gpt2(), id_rows(), left_with_positions)


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


for _name, _model in (("gpt2", gpt2), ("llama", llama)):
    register(f"labels_in_loop_{_name}", lambda m=_model: Case(m(), id_rows(), unlabelled, masked_labels))
    register(
        f"labels_in_loop_no_mask_{_name}", lambda m=_model: Case(m(), id_rows(), unlabelled, masked_labels_no_mask)
    )


@program()
def labels_in_loop_padded_in_tokenizer() -> Case:
    """The tokenizer pads to max_length, the loop makes the labels."""
    encoded = tokenizer(pair=False)(texts(), padding="max_length", max_length=14, return_tensors="pt")
    rows = [{key: encoded[key][i] for key in ("input_ids", "attention_mask")} for i in range(ROWS)]
    return Case(gpt2(), rows, None, masked_labels)


@program()
def labels_in_loop_where() -> Case:
    """Labels by torch.where on the padding id."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        return model(**batch, labels=torch.where(ids == 0, -100, ids)).loss

    return Case(llama(), id_rows(), unlabelled, loss)


@program()
def labels_in_loop_prompt_masked() -> Case:
    """The loop hides each prompt's tokens by its length."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**unlabelled(rows), "prompt": torch.tensor([len(row["input_ids"]) // 2 for row in rows])}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        prompt = batch.pop("prompt")
        positions = torch.arange(batch["input_ids"].shape[1])
        hidden = (batch["attention_mask"] == 0) | (positions[None] < prompt[:, None])
        return model(**batch, labels=batch["input_ids"].masked_fill(hidden, -100)).loss

    return Case(gpt2(), id_rows(), collate, loss)


@program()
def labels_in_loop_masked_model() -> Case:
    """BERT trained to repeat its input: labels -100 at padding, made in the loop."""
    return Case(bert("MaskedLM"), id_rows(), unlabelled, masked_labels)


@program()
def labels_in_loop_t5() -> Case:
    """T5 whose targets come padded with 0; the loop writes -100."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**unlabelled(rows), "targets": padded([row["labels"] for row in rows])}

    def loss(model: Any, batch: Any) -> torch.Tensor:
        labels = batch.pop("targets").clone()
        labels[labels == 0] = -100
        return model(**batch, labels=labels).loss

    return Case(t5(), pair_rows(), collate, loss)


@program()
def labels_in_loop_accuracy() -> Case:
    """Token accuracy read from the logits of each step."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        output = model(**batch)
        float((output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean())
        return output.loss

    return Case(llama(), id_rows(), causal, loss)


@program()
def glue_pairs() -> Case:
    """run_glue: pairs of sentences with token types, DataCollatorWithPadding."""
    rows = [
        {**tokenizer()(a, b), "labels": i % 2} for i, (a, b) in enumerate(zip(texts(high=6), texts(high=6, seed=1)))
    ]
    return Case(bert(num_labels=2), rows, hf.DataCollatorWithPadding(tokenizer()))


@program()
def glue_regression() -> Case:
    """STS-B: one real label, mean squared error inside the model."""
    rows = [{**row, "labels": float(row["labels"])} for row in labelled()]
    return Case(bert(num_labels=1), rows, classify)


@program()
def multi_label() -> Case:
    """problem_type multi_label_classification: binary cross-entropy inside the model."""
    rows = [{**row, "labels": [1.0, 0.0, float(row["labels"] % 2)]} for row in labelled()]
    return Case(bert(problem_type="multi_label_classification"), rows, classify)


@program()
def token_classification() -> Case:
    """run_ner: labels padded by -100."""
    draw = random.Random(0)
    rows = [{**row, "labels": [-100, *(draw.randrange(CLASSES) for _ in row["input_ids"][1:])]} for row in id_rows()]
    return Case(bert("TokenClassification"), rows, translate)


@program()
def token_classification_deberta() -> Case:
    """run_ner with DeBERTa."""
    draw = random.Random(0)
    rows = [{**row, "labels": [-100, *(draw.randrange(CLASSES) for _ in row["input_ids"][1:])]} for row in id_rows()]
    return Case(build("DebertaV2", "ForTokenClassification", **_DEBERTA), rows, translate)


@program()
def question_answering() -> Case:
    """run_qa: start and end positions, texts padded to one length."""
    rows = [{**row, "labels": number % 6} for number, row in enumerate(id_rows(low=10, high=10))]
    return Case(bert("QuestionAnswering", num_labels=2), rows, answers)


@program("one-example or refused: pad", "scores of padding enter the softmax over positions")
def question_answering_dynamic_padding() -> Case:
    """run_qa with DataCollatorWithPadding."""
    return Case(bert("QuestionAnswering", num_labels=2), labelled(), answers)


def answers(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Start and end positions."""
    starts = torch.tensor([row["labels"] for row in rows])
    return {**unlabelled(rows), "start_positions": starts, "end_positions": starts + 1}


@program()
def multiple_choice() -> Case:
    """run_swag: four endings an example, folded into rows inside the model."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = padded([row["input_ids"] for four in rows for row in four])
        shape = (len(rows), 4, -1)
        return {
            "input_ids": ids.view(shape),
            "attention_mask": (ids != 0).long().view(shape),
            "labels": torch.tensor([len(four[0]["input_ids"]) % 4 for four in rows]),
        }

    rows = id_rows(4 * ROWS)
    return Case(bert("MultipleChoice"), [rows[i : i + 4] for i in range(0, len(rows), 4)], collate)


@program()
def translate_t5_collator() -> Case:
    """run_translation: T5, DataCollatorForSeq2Seq padding to multiples of 8."""
    model = t5()
    return Case(model, pair_rows(), hf.DataCollatorForSeq2Seq(tokenizer(), model=model, pad_to_multiple_of=8))


def heads(body: Any, hidden: int = 2) -> Wrapped:
    """A head on the last two hidden states of a body."""

    def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        found = self.body(input_ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
        return {"loss": F.cross_entropy(self.head(torch.cat([found[-1][:, 0], found[-2][:, 0]], -1)), labels)}

    return Wrapped(forward, body=body, head=nn.Linear(hidden * WIDTH, CLASSES))


def loss_key(model: Any, batch: Any) -> torch.Tensor:
    """Models that return a dictionary with the loss."""
    return model(**batch)["loss"]


_BODIES = {
    "bert": lambda: bert(None),
    "llama": lambda: build("Llama", "Model"),
    "modernbert": lambda: build("ModernBert", "Model", cls_token_id=2, sep_token_id=3, **_NO_KV),
    "gpt2": lambda: gpt2("GPT2Model"),
}
for _name, _body in _BODIES.items():
    register(f"hidden_states_{_name}", lambda b=_body: Case(heads(b()), labelled(), classify, loss_key))


@program()
def hidden_states_layer_mixture() -> Case:
    """ELMo's learned mixture of all layers, config.output_hidden_states=True."""

    def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        layers = torch.stack(self.body(input_ids, attention_mask=attention_mask).hidden_states)
        mixed = (self.mix.softmax(0)[:, None, None, None] * layers).sum(0)
        return {"loss": F.cross_entropy(self.head(mixed[:, 0]), labels)}

    body = bert(None, output_hidden_states=True)
    model = Wrapped(forward, body=body, head=nn.Linear(WIDTH, CLASSES), mix=nn.Parameter(torch.zeros(3)))
    return Case(model, labelled(), classify, loss_key)


@program()
def attentions_head() -> Case:
    """A head that reads attention weights (output_attentions)."""

    def forward(self: Any, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, torch.Tensor]:
        output = self.body(input_ids, attention_mask=attention_mask, output_attentions=True)
        features = output.last_hidden_state[:, 0] * output.attentions[-1].mean(1)[:, 0, :1]
        return {"loss": F.cross_entropy(self.head(features), labels)}

    body = bert(None, attn_implementation="eager")
    return Case(Wrapped(forward, body=body, head=nn.Linear(WIDTH, CLASSES)), labelled(), classify, loss_key)


@program()
def llava() -> Case:
    """LLaVA: a picture and a text; the model selects hidden states of the vision tower."""
    vision = hf.CLIPVisionConfig(**{**_VISION, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8})
    places = {"image_token_id": 1, "image_token_index": 1, "image_seq_length": 4}
    selection = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
    config = hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SMALL), **places, **selection)
    rows = [{"input_ids": [2, 1, 1, 1, 1, *row["input_ids"]], "image": x} for row, (x, _) in zip(id_rows(), images())]
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**causal(rows), "pixel_values": torch.stack([row["image"] for row in rows])}

    return Case(hf.LlavaForConditionalGeneration(config), rows, collate)


@program()
def eval_mode() -> Case:
    """A model in eval mode, as from_pretrained leaves it, is trained without dropout."""
    return Case(bert().eval(), labelled(), classify)


@program()
def reloaded() -> Case:
    """save_pretrained, then from_pretrained, then training."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        gpt2().save_pretrained(folder)
        model = hf.GPT2LMHeadModel.from_pretrained(folder)
    return Case(model, id_rows(), causal)


@program()
def checkpointing() -> Case:
    """gradient_checkpointing_enable()."""
    model = llama()
    model.gradient_checkpointing_enable()
    return Case(model, id_rows(), causal)


@program()
def checkpointing_reentrant() -> Case:
    """Gradient checkpointing of the older kind."""
    model = bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return Case(model, labelled(), classify)


@program()
def autocast_bfloat16() -> Case:
    """Forward pass under autocast."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    return Case(bert(), labelled(), classify, loss, exact=False)


@program()
def bfloat16_model() -> Case:
    """The whole model in bfloat16."""
    return Case(llama().to(torch.bfloat16), id_rows(), causal, exact=False)


@program()
def wav2vec2_spec_augment() -> Case:
    """wav2vec2 CTC with its default SpecAugment, which draws masks by row with numpy."""
    return speech("ForCTC", lambda n: [random.Random(n).randrange(1, 31) for _ in range(4)], mask_time_length=2)


@program()
def wav2vec2_classification() -> Case:
    """wav2vec2 classification of sounds of one length."""
    return speech("ForSequenceClassification", lambda n: n % CLASSES, mask_time_length=2, num_labels=CLASSES)


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
        mask = padded([torch.ones(len(x), dtype=torch.long) for x, _ in rows])
        return {
            "input_values": padded([x for x, _ in rows]),
            "attention_mask": mask,
            "labels": torch.tensor([y for _, y in rows]),
        }

    return Case(getattr(hf, f"Wav2Vec2{head}")(config), rows, collate, exact=False)


@program()
def whisper() -> Case:
    """Whisper: log-mel features, and labels padded by -100."""
    sizes = {**PAIR, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
    tokens = {"begin_suppress_tokens": None, "suppress_tokens": None, "decoder_start_token_id": 2}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**{**sizes, **tokens}))
    rows = [{"features": torch.randn(8, 24), "labels": row["input_ids"]} for row in id_rows(high=8)]

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        features = torch.stack([row["features"] for row in rows])
        return {"input_features": features, "labels": padded([row["labels"] for row in rows], -100)}

    return Case(model, rows, collate)


@program("one-example", "the loss divides by a count of patches over the batch")
def image_autoencoder_mae() -> Case:
    """run_mae: ViT-MAE hides patches at random by row."""
    decoder = {f"decoder_{k}": v for k, v in _VISION.items()}
    config = hf.ViTMAEConfig(**_VISION, **decoder, image_size=16, patch_size=4)
    rows = [{"pixel_values": x} for x, _ in images()]
    return Case(hf.ViTMAEForPreTraining(config), rows, None, exact=False)


@program("one-example", "data choose which tokens an expert's weights see")
def mixture_of_experts() -> Case:
    """Mixtral, fine-tuned as a whole."""
    return Case(
        build("Mixtral", "ForCausalLM", num_local_experts=4, num_experts_per_tok=2), id_rows(), causal, exact=False
    )


def packing(rows: list[Any]) -> dict[str, torch.Tensor]:
    """All examples in one row without padding, with a map of the tokens' examples."""
    parts = [row["input_ids"] for row in rows]
    positions = [n for part in parts for n in range(len(part))]
    labels = [token if n else -100 for part in parts for n, token in enumerate(part)]
    units = [number for number, part in enumerate(parts) for _ in part]
    flat = {"input_ids": sum(parts, []), "position_ids": positions, "labels": labels, "units": units}
    return {name: torch.tensor([value]) for name, value in flat.items()}


@program()
def packed_rows() -> Case:
    """Padding-free rows with unit_map."""
    return Case(llama(use_cache=False), id_rows(), packing, options={"unit_map": "units"})


@program()
def packed_flattening_collator() -> Case:
    """DataCollatorWithFlattening with a map beside it."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = hf.DataCollatorWithFlattening()([{"input_ids": row["input_ids"]} for row in rows])
        return {**batch, "units": packing(rows)["units"]}

    return Case(llama(use_cache=False), id_rows(), collate, options={"unit_map": "units"})


@program()
def users_of_several_rows() -> Case:
    """User-level privacy: several rows a user."""
    return Case(
        bert(),
        labelled(),
        classify,
        options={"user_ids": [n // 2 for n in range(ROWS)], "max_examples_per_user": 2},
        loader={"batch_size": 4},
        exact=False,
    )


@program()
def physical_batches() -> Case:
    """Microbatches of three rows."""
    return Case(gpt2(), id_rows(), causal, options={"max_physical_batch_size": 3})


@program()
def tied_embeddings_called_twice() -> Case:
    """tie_weights() again after make_private, and to(device)."""

    def touch(model: Any, optimizer: Any, step: int) -> None:
        model.tie_weights()
        model.to("cpu")

    return Case(gpt2(), id_rows(), causal, after_step=touch)


@program("one-example", "the mask chooses which tokens the loss sees")
def electra_discriminator() -> Case:
    """Replaced-token detection: labels of 0 and 1 at each token."""
    rows = [
        {**row, "labels": [float(n % 3 == 0) for n in range(len(row["input_ids"]))]} for row in id_rows(low=8, high=8)
    ]
    model = build("Electra", "ForPreTraining", embedding_size=WIDTH, **_NO_KV)
    return Case(model, rows, lambda found: {**unlabelled(found), "labels": torch.tensor([r["labels"] for r in found])})


@program()
def roberta_prompt_words() -> Case:
    """Label words at the place of the mask token (LM-BFF)."""

    def forward(self: Any, input_ids: Any, attention_mask: Any, place: Any, labels: Any) -> torch.Tensor:
        hidden = self.lm.bert(input_ids, attention_mask).last_hidden_state
        scores = self.lm.cls(hidden[torch.arange(len(place)), place])
        return F.cross_entropy(scores[:, [10, 11, 12]], labels)

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**classify(rows), "place": torch.tensor([len(row["input_ids"]) // 2 for row in rows])}

    return Case(Wrapped(forward, lm=bert("MaskedLM")), labelled(), collate, keywords)


@program()
def embeddings_resized() -> Case:
    """A token added, embeddings resized before make_private."""
    model = llama(vocab_size=VOCABULARY - 4)
    model.resize_token_embeddings(VOCABULARY)
    return Case(model, id_rows(), causal)
