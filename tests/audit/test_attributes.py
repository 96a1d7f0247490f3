"""Attributes are read off representations that hold them, and not off those that do not."""

from __future__ import annotations

import pytest
import torch

from fastdp import audit


@pytest.mark.parametrize("hidden", [0, 16])
def test_an_attribute_in_the_representations_is_inferred_and_noise_hides_it(hidden: int) -> None:
    torch.manual_seed(0)
    attribute = torch.randint(0, 3, (600,))
    rows = torch.randn(600, 10)
    rows[:, :3] += 4 * torch.nn.functional.one_hot(attribute, 3)

    def attack(released: torch.Tensor) -> audit.AttributeResult:
        return audit.attribute_inference(
            released[:400], attribute[:400], released[400:], attribute[400:], hidden=hidden
        )

    clear, hidden_away = attack(rows), attack(rows + 100 * torch.randn(600, 10))
    assert clear.accuracy > 0.9
    assert clear.empirical_privacy == 1 - clear.accuracy
    assert hidden_away.accuracy < 0.55  # chance is a third of 200: six standard errors above
    assert 1 / 3 <= clear.majority < 0.5
    assert (clear.known, clear.attacked) == (400, 200)


def test_a_hidden_layer_reads_what_a_linear_classifier_cannot() -> None:
    torch.manual_seed(0)
    rows = torch.randn(800, 2)
    attribute = (rows.prod(1) > 0).long()
    linear, deep = (
        audit.attribute_inference(
            rows[:600], attribute[:600], rows[600:], attribute[600:], hidden=hidden, iterations=60
        )
        for hidden in (0, 16)
    )
    assert linear.accuracy < 0.75
    assert deep.accuracy > 0.9


def test_representations_are_pooled_over_the_tokens_that_are_there() -> None:
    released = torch.tensor([[[1.0, 3.0], [5.0, 7.0]], [[2.0, 4.0], [9.0, 9.0]]])
    assert audit.pooled(released).tolist() == [[3.0, 5.0], [5.5, 6.5]]
    mask = torch.tensor([[True, True], [True, False]])
    assert audit.pooled(released, mask).tolist() == [[3.0, 5.0], [2.0, 4.0]]


def test_nonsense_is_refused() -> None:
    rows, labels = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(ValueError, match="representations of shape"):
        audit.attribute_inference(rows, labels[:3], rows, labels)
    with pytest.raises(ValueError, match="nothing to learn"):
        audit.attribute_inference(rows, torch.zeros(4).long(), rows, labels)
