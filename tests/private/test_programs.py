"""Programs of `tests/honest` that guard a run in the quick tier; the slow tier runs all of them."""

from __future__ import annotations

import pytest

from tests.honest.harness import load, run_privately

PROGRAMS = load()
NAMES = """
zero_grad_in_place no_zero_grad weights_clamped_by_a_hook compiled_before gradient_scaler
frozen_later unfrozen_by_layers gradient_hooks
optimizer_by_signs optimizer_rmsprop optimizer_adagrad optimizer_adafactor
accumulated_by_hand class_weights_mean_outside gradient_penalty_inside adversarial_inputs_inside second_run_after_detach
texts_as_input summed_embeddings_list_of_texts summed_embeddings_list_of_lengths inputs_time_first
classify_deberta_single_label larger_of_two_losses rdrop_in_loop two_views_in_loop counter_buffer spectral_norm
iterable_dataset weighted_sampler hugging_face_transform
sorted_rows sorted_rows_by_value noise_in_collator
functional_batch_norm batch_norm_1d encoder_without_mask patch_dropout layer_drop_torch layer_drop_numpy
forward_draws_bernoulli forward_draws_python_rows forward_draws_one_number
""".split()


@pytest.mark.parametrize("name", NAMES)
def test_a_program_ends_as_expected_and_its_sums_are_exact(name: str) -> None:
    result = run_privately(PROGRAMS[name])
    assert result.ok, result.line()
