"""An example's loss is the model's own on that example alone, whatever the batch around it."""

import pytest
import torch
import transformers

from fastdp import audit
from fastdp.data import Collator, causal_examples
from tests.audit.conftest import DECOYS, PLANTED, sentences


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_each_loss_is_the_models_on_the_example_alone(learned, batch_size):
    texts = [*sentences(PLANTED), "Gout.", *sentences(DECOYS)]
    examples = causal_examples(learned.tokenizer, texts, 40)
    seen = []
    losses = audit.example_losses(learned.model, examples.items, Collator(0), batch_size, lambda *s: seen.append(s))
    assert seen[-1] == (13, 13)
    for example, loss in zip(examples.items, losses):
        with torch.no_grad():
            alone = learned.model(**Collator(0)([example])).loss
        assert float(loss) == pytest.approx(float(alone), abs=1e-5)


def test_classifiers_have_the_cross_entropy_of_their_label():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config).train()
    examples = [{"input_ids": [1 + i, 2, 3][: 1 + i % 3], "labels": i % 3} for i in range(7)]
    losses = audit.example_losses(model, examples, Collator(0), 3)
    assert model.training
    model.eval()
    for example, loss in zip(examples, losses):
        assert float(loss) == pytest.approx(float(model(**Collator(0)([example])).loss.detach()), abs=1e-5)


def test_what_has_no_loss_is_refused(learned):
    with pytest.raises(ValueError, match="no examples"):
        audit.example_losses(learned.model, [], Collator(0))
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [-100, -100]}]
    with pytest.raises(ValueError, match="example 1 has no labelled token"):
        audit.example_losses(learned.model, rows, Collator(0))
