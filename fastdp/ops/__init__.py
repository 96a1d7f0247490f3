"""The kernels as functions of tensors of any device.

An op lives under the name of its family in three folders: here its schema, checks, definition and what runs on processors
(of AdamW in ``cpu/``); in ``fastdp.kernels`` the function of the op's name that runs on GPUs; its C++ in ``csrc/``.
"""

from .adamw import adamw_noise_step_ as adamw_noise_step_, adamw_noise_steps_ as adamw_noise_steps_
from .bounds import (
    Rounding as Rounding,
    chosen_sqnorm as chosen_sqnorm,
    counted_products as counted_products,
    direct_norms as direct_norms,
    gram_norms as gram_norms,
    row_products as row_products,
    sqnorm as sqnorm,
    token_counts as token_counts,
    token_counts_group as token_counts_group,
)
from .choice import choice_log_probabilities as choice_log_probabilities, exponential_choice as exponential_choice
from .clip import clip_noise as clip_noise
from .dchi import dchi_vectors as dchi_vectors, private_snap as private_snap
from .heads import cross_entropy_gradient_ as cross_entropy_gradient_
from .instances import (
    instance_abs_sum as instance_abs_sum,
    instance_masked_sqnorm as instance_masked_sqnorm,
    instance_masked_sum as instance_masked_sum,
    instance_sqnorm as instance_sqnorm,
    instance_sqnorm_group as instance_sqnorm_group,
    instance_sum as instance_sum,
    instance_sum_group as instance_sum_group,
)
from .noise import add_noise_ as add_noise_, add_noise_group_ as add_noise_group_
from .norms import abs_sum as abs_sum, cross_inner as cross_inner, masked_sqnorm as masked_sqnorm
from .snap import snap as snap
from .stream import NoiseStream as NoiseStream
from .sums import (
    affine_sums as affine_sums,
    affine_sums_group as affine_sums_group,
    column_sums as column_sums,
    masked_weighted_sum as masked_weighted_sum,
    per_unit as per_unit,
    per_unit_group as per_unit_group,
    weighted_sum as weighted_sum,
    weighted_sum_group as weighted_sum_group,
)
