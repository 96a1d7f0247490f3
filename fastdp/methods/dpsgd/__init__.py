"""DP-SGD and its optimizer variants: per-example clipping, Gaussian noise (Abadi et al. 2016)."""

from fastdp.methods.dpsgd.method import DPSGD as DPSGD, AdaptiveClipping as AdaptiveClipping, NonPrivate as NonPrivate
