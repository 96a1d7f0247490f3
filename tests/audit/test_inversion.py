"""Tokens from embeddings, and from deeper representations."""

import pytest
import torch
import transformers

from fastdp import audit

VOCABULARY, WIDTH = 120, 24


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval().requires_grad_(False)
    model.embeddings.word_embeddings.weight.normal_()
    return model


def test_embeddings_without_noise_are_plain_text_and_with_much_noise_they_are_not():
    torch.manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH)
    ids = torch.randint(0, VOCABULARY, (40, 25))
    clear = audit.inversion(audit.nearest_tokens(table[ids], table), ids)
    assert (clear.recovered, clear.empirical_privacy, clear.tokens) == (1.0, 0.0, 1000)
    drowned = audit.inversion(audit.nearest_tokens(table[ids] + 50 * torch.randn(40, 25, WIDTH), table), ids)
    # Chance is 1/120; 1,000 tokens stay below 5% but for a chance of 1e-20.
    assert drowned.recovered < 0.05


def test_only_masked_tokens_count():
    ids = torch.tensor([[1, 2, 3]])
    result = audit.inversion(torch.tensor([[1, 0, 0]]), ids, torch.tensor([[True, True, False]]))
    assert (result.recovered, result.tokens) == (0.5, 2)
    with pytest.raises(ValueError, match="must be equal"):
        audit.inversion(ids, ids[0])
    with pytest.raises(ValueError, match="no token"):
        audit.inversion(ids, ids, torch.zeros(1, 3, dtype=torch.bool))


def test_a_bottom_of_ids_becomes_one_of_embeddings(encoder):
    ids = torch.randint(0, VOCABULARY, (2, 7))
    embedding = encoder.embeddings.word_embeddings
    run = audit.from_embeddings(lambda i: encoder(input_ids=i).last_hidden_state, embedding)
    given = embedding.weight[ids].clone().requires_grad_(True)
    got = run(given)
    assert torch.allclose(got, encoder(input_ids=ids).last_hidden_state, atol=1e-6)
    got.square().sum().backward()
    assert given.grad is not None
    assert not embedding._forward_hooks


@pytest.mark.parametrize("blocks", [1, 2])
def test_tokens_come_back_from_behind_encoder_blocks(encoder, blocks):
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, 6))

    def bottom(i):
        return encoder(input_ids=i, output_hidden_states=True).hidden_states[blocks]

    run = audit.from_embeddings(bottom, encoder.embeddings.word_embeddings)
    table = encoder.embeddings.word_embeddings.weight
    guessed = audit.optimised_tokens(bottom(ids), run, table, steps=60)
    assert audit.inversion(guessed, ids).recovered > 0.9
    noisy = bottom(ids) + 20 * torch.randn(2, 6, WIDTH)
    assert audit.inversion(audit.optimised_tokens(noisy, run, table, steps=60), ids).recovered < 0.5


def test_the_optimisation_refuses_what_it_cannot_use():
    for released, steps, message in ((torch.zeros(3, 4), 10, "sequences, tokens"), (torch.zeros(1, 3, 4), 0, "steps")):
        with pytest.raises(ValueError, match=message):
            audit.optimised_tokens(released, lambda e: e, torch.zeros(5, 4), steps=steps)
