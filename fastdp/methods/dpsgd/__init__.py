"""DP-SGD and its optimizer variants: per-example clipping, Gaussian noise (Abadi et al. 2016)."""

from fastdp.methods.dpsgd.method import DPSGD as DPSGD
from fastdp.methods.dpsgd.method import AdaptiveClipping as AdaptiveClipping
from fastdp.methods.dpsgd.method import NonPrivate as NonPrivate
