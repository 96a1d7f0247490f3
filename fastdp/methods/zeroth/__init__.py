"""DP-ZO: private tuning by two forward passes a step along a public random direction, with noise on one number."""

from fastdp.methods.zeroth.method import DPZO as DPZO
