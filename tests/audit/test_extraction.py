"""Names said by a model that knows them by heart, and by one that never saw them."""

import pytest
import torch

from fastdp import audit


def test_names_are_found_as_whole_words_and_the_longest_first():
    find = audit.NameFinder(["Ann", "Ann Lee", "O.K."])
    assert find("Ann Lee met Anna, Ann and O.K.; O1K. did not.") == ["Ann Lee", "Ann", "O.K."]
    for names in ([], ["Ann", " "]):
        with pytest.raises(ValueError, match="list of names"):
            audit.NameFinder(names)


def test_precision_and_recall():
    texts = ["Ann and Bob.", "Ann, Zoe and Max", ""]
    result = audit.extraction(texts, ["Ann", "Bob", "Cleo", "Dan"], ["Zoe", "Yan"])
    assert (result.extracted, result.named, result.planted, result.texts) == (2, 3, 4, 3)
    assert (result.precision, result.recall) == (2 / 3, 0.5)
    known = audit.extraction(texts, ["Ann", "Bob", "Cleo", "Dan"], ["Zoe"], known={"Ann", "Zoe"})
    assert (known.precision, known.recall, known.planted) == (1.0, 1 / 3, 3)
    assert audit.extraction(["nobody"], ["Ann"], ["Zoe"]).precision == 0.0
    with pytest.raises(ValueError, match="no planted name"):
        audit.extraction(texts, ["Ann"], ["Zoe"], known=["Ann"])
    with pytest.raises(ValueError, match="decoy"):
        audit.extraction(texts, ["Ann"], ["Ann"])


def test_texts_repeat_with_their_seed_and_leave_torchs_generator_alone(learned):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    options = {"length": 6, "batch_size": 2}
    texts = [audit.generate(learned.model, learned.tokenizer, 3, seed=s, **options) for s in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="at least 1"):
        audit.generate(learned.model, learned.tokenizer, 0)
