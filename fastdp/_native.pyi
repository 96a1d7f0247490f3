"""The extension built from csrc/; each function's contract stands above it there.

Tensors and arrays are read and written where they lie, and factors of a use, which the caller keeps alive, as csrc/factor.h
reads them. None stands for what is not there.
"""

from collections.abc import Sequence

from numpy import ndarray
from torch import Tensor

_Memory = Tensor | ndarray | int | None
_Address = int
_Factor = tuple[_Address, int, int, int, int]  # data, element type, width, strides of rows and columns
_Left = tuple[_Factor, _Address, int]  # a matrix, or no matrix and the address and stride of ids

# cpu.cpp
def isa() -> str: ...

# normal.cpp
def normal_mass_below(x: _Memory, count: int, logarithm: bool, out: _Memory) -> None: ...

# norms_direct.cpp, norms_onehot.cpp, norms_gram.cpp
def direct_norms(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    measure: int,
    mask: _Memory,
    out: _Memory,
    gradients: _Memory,
    threads: int,
) -> None: ...
def onehot_norms(
    ids: _Memory,
    ids_stride: int,
    right: _Factor,
    bounds: Sequence[int],
    measure: int,
    mask: _Memory,
    out: _Memory,
    threads: int,
) -> None: ...
def gram_sqnorm(
    lefts: Sequence[_Factor],
    right: _Factor,
    bounds: Sequence[int],
    most: int,
    out: _Memory,
    products: _Memory,
    counts: _Memory,
    threads: int,
) -> None: ...
def cross_inner(
    left1: _Left,
    right1: _Factor,
    left2: _Left,
    right2: _Factor,
    bounds1: Sequence[int],
    bounds2: Sequence[int],
    out: _Memory,
    threads: int,
) -> None: ...

# bounds.cpp
def token_counts(left: _Factor, right: _Factor, bounds: Sequence[int], counts: _Memory) -> None: ...
def row_products(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    one_hot: bool,
    square: bool,
    out: _Memory,
    counts: _Memory,
    threads: int,
) -> None: ...
def upper_norms(
    blocks: Sequence[tuple[_Memory, bool, int, _Memory, _Memory]],
    groups: _Memory,
    errors: _Memory,
    rows: int,
    count: int,
    units: int,
    square: bool,
    norms: _Memory,
    measured: _Memory,
    cancelling: _Memory,
) -> None: ...
def round_down(ratios: _Memory, groups: int, units: int, least: float, weights: _Memory) -> None: ...

# sums.cpp
def affine_sums(
    gradient: _Factor,
    x: _Factor,
    mean: _Memory,
    rstd: _Memory,
    bounds: Sequence[int],
    out: _Memory,
    threads: int,
) -> None: ...
def masked_weighted_sum(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    masked: Sequence[float],
    unmasked: Sequence[float],
    mask: _Memory,
    out: _Memory,
    out_row: int,
    threads: int,
) -> None: ...
def onehot_add(
    ids: _Memory,
    ids_stride: int,
    right: _Factor,
    tokens: int,
    masked: _Memory,
    unmasked: _Memory,
    mask: _Memory,
    out: _Memory,
    out_stride: int,
    threads: int,
) -> None: ...

# instances.cpp
def instance_norms(
    instances: _Memory, units: int, size: int, measure: int, mask: _Memory, out: _Memory, threads: int
) -> None: ...
def instance_sum(instances: _Memory, units: int, size: int, weights: _Memory, out: _Memory, threads: int) -> None: ...
def instance_masked_sum(
    instances: _Memory,
    units: int,
    size: int,
    masked: _Memory,
    unmasked: _Memory,
    mask: _Memory,
    out: _Memory,
    threads: int,
) -> None: ...

# noise.cpp
def add_noise(
    x: _Memory, dtype: int, first: int, n: int, std: float, position: _Memory, rounded: bool, threads: int
) -> None: ...
def chacha_words(out: _Memory, first: int, blocks: int, position: _Memory, threads: int, isa: str) -> None: ...
def noise_normals(out: _Memory, first: int, n: int, position: _Memory, threads: int, isa: str) -> None: ...
def exact_normal(position: _Memory, index: int) -> tuple[float, float]: ...

# clip.cpp
def clip_noise(
    x: _Memory,
    out: _Memory,
    norm: _Memory,
    dtype: int,
    rows: int,
    length: int,
    bound: float,
    std: float,
    position: _Memory,
    rounded: bool,
    threads: int,
) -> None: ...
def clip_backward(
    grad: _Memory,
    x: _Memory,
    norm: _Memory,
    out: _Memory,
    dtype: int,
    rows: int,
    length: int,
    bound: float,
    threads: int,
) -> None: ...

# adamw.cpp
def adamw_noise_step(
    param: _Memory,
    dtype: int,
    grad: _Memory,
    mean: _Memory,
    square: _Memory,
    n: int,
    start: int,
    position: _Memory,
    rounded: bool,
    std: float,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    rows: _Memory,
    columns: _Memory,
    width: int,
    threads: int,
) -> None: ...

# snap.cpp
class Snap:
    def __init__(
        self, table: _Memory, rows: int, d: int, centre: _Memory, table_bits: int, half: bool, threads: int
    ) -> None: ...
    def begin(self, x: _Memory, n: int, out: _Memory) -> None: ...
    def tile(self, first: int, n: int, out: _Memory) -> None: ...
    def scan(self, first: int, n: int, scores: _Memory) -> None: ...
    def finish(self, out: _Memory) -> None: ...

def survey(table: _Memory, rows: int, d: int, threads: int) -> tuple[int, int]: ...
def has_bf16_products() -> bool: ...

# dchi.cpp
def dchi_rows(
    table: _Memory,
    ids: _Memory,
    eta: _Memory,
    eta_stride: int,
    first: int,
    n: int,
    d: int,
    position: _Memory,
    out: _Memory,
    threads: int,
) -> None: ...

# choice.cpp
def exponential_choice(
    table: _Memory,
    rows: int,
    d: int,
    centre: _Memory,
    table_bits: int,
    order: _Memory,
    starts: _Memory,
    laws: int,
    law_ids: _Memory,
    law_scales: _Memory,
    log_prior: _Memory,
    cap: float,
    position: _Memory,
    out: _Memory,
    threads: int,
) -> None: ...
def has_matrix_tiles() -> bool: ...
