"""The kernels as functions of tensors of any device.

A module here holds an op's schema, checks and definition, and what runs on processors, whose C++ is in ``csrc/``. On GPUs runs
the function of the op's name in its family of ``fastdp.kernels``. What is imported ``as`` itself is on the site's page of ops;
the others are forms for many matrices, under masks or of a method, which the engine calls.
"""

# ruff: noqa: F401

from .adamw import adamw_noise_step_ as adamw_noise_step_, adamw_noise_steps_ as adamw_noise_steps_
from .bounds import Rounding, row_products, token_counts
from .choice import choice_log_probabilities, exponential_choice as exponential_choice
from .clip import clip_noise as clip_noise
from .cross import cross_inner as cross_inner
from .dchi import dchi_vectors, private_snap as private_snap
from .gram import gram_norms
from .heads import cross_entropy_gradient_ as cross_entropy_gradient_
from .instances import (
    instance_abs_sum,
    instance_masked_sqnorm,
    instance_masked_sum,
    instance_sqnorm as instance_sqnorm,
    instance_sqnorm_group,
    instance_sum as instance_sum,
    instance_sum_group,
)
from .noise import add_noise_ as add_noise_, add_noise_group_
from .norms import abs_sum as abs_sum, chosen_sqnorm, direct_norms, masked_sqnorm, sqnorm as sqnorm
from .per_unit import (
    affine_sums as affine_sums,
    affine_sums_group,
    column_sums as column_sums,
    per_unit as per_unit,
    per_unit_group,
)
from .snap import snap as snap
from .stream import NoiseStream as NoiseStream
from .sums import masked_weighted_sum, weighted_sum as weighted_sum, weighted_sum_group
