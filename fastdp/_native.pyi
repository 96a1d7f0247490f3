"""The extension built from csrc/; each function's contract stands above it there.

Tensors cross as addresses, which the caller keeps alive, and factors of a use as csrc/factor.h reads them.
"""

from collections.abc import Sequence

_Address = int
_Factor = tuple[
    _Address, int, int, int, int, _Address
]  # data, element type, width, strides of rows and columns, scale or 0
_Left = tuple[_Factor, _Address, int]  # a matrix, or no matrix and the address and stride of ids

# cpu.cpp
def isa() -> str: ...

# normal.cpp
def normal_mass_below(x: _Address, count: int, logarithm: bool, out: _Address) -> None: ...

# norms_direct.cpp, norms_onehot.cpp, norms_gram.cpp
def direct_norms(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    measure: int,
    mask: _Address,
    out: _Address,
    threads: int,
) -> None: ...
def onehot_norms(
    ids: _Address,
    ids_stride: int,
    right: _Factor,
    bounds: Sequence[int],
    measure: int,
    mask: _Address,
    out: _Address,
    threads: int,
) -> None: ...
def gram_sqnorm(
    lefts: Sequence[_Factor],
    right: _Factor,
    bounds: Sequence[int],
    out: _Address,
    products: _Address,
    threads: int,
) -> None: ...
def cross_inner(
    left1: _Left,
    right1: _Factor,
    left2: _Left,
    right2: _Factor,
    bounds1: Sequence[int],
    bounds2: Sequence[int],
    out: _Address,
    threads: int,
) -> None: ...

# bounds.cpp
def row_products(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    one_hot: bool,
    square: bool,
    out: _Address,
    threads: int,
) -> None: ...

# sums.cpp
def affine_sums(
    gradient: _Factor,
    x: _Factor,
    mean: _Address,
    rstd: _Address,
    bounds: Sequence[int],
    out: _Address,
    threads: int,
) -> None: ...
def masked_weighted_sum(
    left: _Factor,
    right: _Factor,
    bounds: Sequence[int],
    masked: Sequence[float],
    unmasked: Sequence[float],
    mask: _Address,
    out: _Address,
    out_row: int,
    threads: int,
) -> None: ...
def onehot_add(
    ids: _Address,
    ids_stride: int,
    right: _Factor,
    tokens: int,
    weights: _Address,
    out: _Address,
    out_stride: int,
    threads: int,
) -> None: ...
def onehot_masked_add(
    ids: _Address,
    ids_stride: int,
    right: _Factor,
    tokens: int,
    masked: _Address,
    unmasked: _Address,
    mask: _Address,
    out: _Address,
    out_stride: int,
    threads: int,
) -> None: ...

# instances.cpp
def instance_norms(
    instances: _Address, units: int, size: int, measure: int, mask: _Address, out: _Address, threads: int
) -> None: ...
def instance_sum(
    instances: _Address,
    units: int,
    size: int,
    masked: _Address,
    unmasked: _Address,
    mask: _Address,
    out: _Address,
    threads: int,
) -> None: ...

# noise.cpp
def add_noise(
    x: _Address, dtype: int, first: int, n: int, std: float, position: _Address, rounded: bool, threads: int
) -> None: ...
def chacha20_words(out: _Address, first: int, blocks: int, position: _Address, threads: int, isa: str) -> None: ...
def noise_normals(out: _Address, first: int, n: int, position: _Address, threads: int, isa: str) -> None: ...
def exact_normal(position: _Address, index: int) -> tuple[float, float]: ...

# clip.cpp
def clip_noise(
    x: _Address,
    out: _Address,
    norm: _Address,
    dtype: int,
    rows: int,
    length: int,
    bound: float,
    std: float,
    position: _Address,
    rounded: bool,
    threads: int,
) -> None: ...
def clip_backward(
    grad: _Address,
    x: _Address,
    norm: _Address,
    out: _Address,
    dtype: int,
    rows: int,
    length: int,
    bound: float,
    threads: int,
) -> None: ...

# adamw.cpp
def adamw_noise_step(
    param: _Address,
    dtype: int,
    grad: _Address,
    mean: _Address,
    square: _Address,
    n: int,
    position: _Address,
    rounded: bool,
    std: float,
    divisor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    corrected: bool,
    floor: float,
    rows: _Address,
    columns: _Address,
    width: int,
    threads: int,
) -> None: ...

# snap.cpp
class Snap:
    def __init__(
        self, table: _Address, rows: int, d: int, centre: _Address, table_bits: int, half: bool, threads: int
    ) -> None: ...
    def begin(self, x: _Address, n: int, out: _Address) -> None: ...
    def tile(self, first: int, n: int, out: _Address) -> None: ...
    def scan(self, first: int, n: int, scores: _Address) -> None: ...
    def finish(self, out: _Address) -> None: ...

def survey(table: _Address, rows: int, d: int, threads: int) -> tuple[int, int]: ...
def has_bf16_products() -> bool: ...

# dchi.cpp
def dchi_rows(
    table: _Address,
    ids: _Address,
    eta: _Address,
    eta_stride: int,
    first: int,
    n: int,
    d: int,
    position: _Address,
    out: _Address,
    threads: int,
) -> None: ...

# choice.cpp
def exponential_choice(
    table: _Address,
    rows: int,
    d: int,
    centre: _Address,
    table_bits: int,
    order: _Address,
    starts: _Address,
    laws: int,
    law_ids: _Address,
    law_scales: _Address,
    log_prior: _Address,
    slopes: _Address,
    cap: float,
    position: _Address,
    out: _Address,
    threads: int,
) -> None: ...
def has_matrix_tiles() -> bool: ...
