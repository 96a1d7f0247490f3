"""Ordinary programs end as their authors may expect: a sample here, all of them in the slow tier."""

import sys

import pytest

from .harness import EXACT, FAMILIES, Case, Program, load, run_privately, sum_error, table
from .kit import MEAN, mlp, numbers
from .run import run

PROGRAMS = load()
#: Programs of every family, with the forms that a check is most likely to take for a mistake.
SAMPLE = """
labels_in_loop_llama labels_in_loop_no_mask_gpt2 labels_in_loop_t5 labels_in_loop_masked_model hidden_states_bert llava
causal_mistral checkpointing packed_rows lora dora last_layer transformer_encoder_outside packed_lstm
focal_inside entropy_bonus_inside class_weights_criterion autoencoder_bce_outside mlm_rate_of_02 counts_for_the_log sorted_rows
flip_torch_outside noise_in_loop_outside diffusion_criterion forward_draws_numpy_rows saved_each_epoch
guard_exit_outside trainer_criterion left_padding_one_long batch_norm_2d class_embeddings_given checkpointed_pieces
one_letter_at_a_time sorted_for_packing
""".split()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_program_ends_as_expected(name):
    """Without privacy they run in the slow tier, which tries that first."""
    result = run_privately(PROGRAMS[name])
    assert result.ok, result.line()


def test_a_generator_that_learns_is_no_coupling():
    """What it makes moves from batch to batch, for an example alone as beside others."""
    results = [run_privately(PROGRAMS["discriminator_in_one_forward"], seed) for seed in range(3)]
    assert all(result.ok for result in results), results


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_program_of_a_family_at_ten_seeds(family):
    rows = run([name for name, program in PROGRAMS.items() if program.family == family], seeds=10)
    failed = [f"{row['name']}: {row['route']} {row['held']}/{row['seeds']} {row['message']}" for row in rows]
    assert not [line for line, row in zip(failed, rows) if row["held"] < row["seeds"]]


def test_the_suite_is_as_large_as_it_says():
    assert len(PROGRAMS) >= 325
    assert len(set(SAMPLE)) == 34
    assert {PROGRAMS[name].family for name in SAMPLE} == set(FAMILIES)


def test_an_outcome_is_judged_by_what_was_stated():
    mixed = PROGRAMS["left_padding"]  # one-example, or refused for its padding
    assert mixed.accepts("one-example", "")
    assert mixed.accepts("uses", "")
    assert mixed.accepts("refused", "Padding changes this row's loss")
    assert not mixed.accepts("refused", "the model couples examples")
    assert not mixed.accepts("crash", "padding")
    assert not PROGRAMS["plain"].accepts("one-example", "")


def test_a_table_shows_what_did_not_hold():
    row = {"family": "loops", "expected": "uses", "made": 3, "paid": 3, "why": "", "seeds": 10, "message": "late"}
    fast, failed = (
        {**row, "name": "plain", "route": "uses", "held": 10},
        {**row, "name": "a_b", "route": "uses", "held": 7},
    )
    slow = {**row, "name": "slow", "route": "one-example", "held": 10, "why": "the data choose"}
    lines = table([fast, failed, slow])
    assert lines[2] == "| loops | 3 | 2 | 1 | 0 | 1 |"
    assert lines[6:] == ["| a b | **uses** (7 of 10 seeds) | late |", "| slow | one-example | the data choose |"]


def test_a_sum_is_compared_with_autograd():
    assert sum_error(PROGRAMS["two_heads"].build) < EXACT
    # What is drawn in one run and not in the other makes another sum.
    assert sum_error(PROGRAMS["forward_draws_normal"].build) > EXACT


@pytest.mark.parametrize("loop", [lambda run: sys.exit(1), lambda run: run.start() and 1 / 0])
def test_a_crash_is_not_a_refusal(loop):
    ending = Program("ending", "loops", lambda: Case(mlp(), numbers(), options=MEAN, loop=loop), "refused: ", "it ends")
    assert run_privately(ending).outcome == "crash"
