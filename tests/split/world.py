"""A tiny classifier with its tokenizer, texts to train on, and a vendor of it."""

import peft
import torch
from transformers import BertConfig, BertForSequenceClassification

from fastdp.methods.sap import PrivateBottom, split_model
from fastdp.split import Limits, SplitVendor
from fastdp.split.connection import Connection
from fastdp.split.operations import replies
from fastdp.split.vendor import default_lora
from tests.tokenizers_for_tests import word_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
LIMITS = Limits(max_tokens=16, max_batch=8, max_message_bytes=1 << 18)
ETA = 40.0


def make_tokenizer():
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return word_tokenizer(WORDS, "[CLS] $A [SEP] $B:1 [SEP]:1", model_input_names=names, **special)


def make_model(dropout=0.0, width=16, layers=2):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def make_vendor(folder, dropout=0.0, **options):
    """A vendor whose new adapters are always the same."""
    model = make_model(dropout)
    return SplitVendor(model, folder, tokenizer=make_tokenizer(), **{"limits": LIMITS, **options})


def ask(service, name, message):
    """What the service answers to one message of a customer's own end."""
    connection = Connection(service.address, insecure=True, name=name)
    answer = connection.call(message, replies(service.vendor.served))
    connection.close()
    return answer


def make_texts(count):
    """Texts and labels: class 1 has more words of the second half."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 2, (count,), generator=generator).tolist()
    texts = []
    for label in labels:
        words = (
            torch.randint(0, 40, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator) + 20 * label
        )
        texts.append(" ".join(f"w{word}" for word in words.tolist()))
    return texts, labels


def noisy_rows(customer):
    """A privatizer of the customer's bottom, whose draws a test can repeat."""
    return PrivateBottom(customer.bottom, eta=ETA, unsafe_seed=3)


def train_in_process(model, store, labels, batches, after=0, learning_rate=1e-3):
    """Plain PyTorch and peft on the same released rows: losses, and the adapter. ``model`` as the vendor got it."""
    top = split_model(model, after)[1]
    top.requires_grad_(False)
    top = peft.get_peft_model(top, default_lora(model)).train()
    trained = {name: p for name, p in top.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(list(trained.values()), lr=learning_rate, weight_decay=0.01)
    losses = []
    for indices in batches:
        rows, mask = store.batch(indices.tolist(), left=False)
        logits = top(inputs_embeds=rows, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels)[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in trained.items()}


def merged_model(model, adapter):
    """The whole model with a trained adapter, in evaluation."""
    whole = peft.get_peft_model(model, default_lora(model))
    missing = whole.load_state_dict(adapter, strict=False)
    assert not missing.unexpected_keys
    return whole.eval()
