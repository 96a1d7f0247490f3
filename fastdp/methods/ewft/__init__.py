"""EW-FT: local differential privacy in the forward pass, with noise that follows the epoch; DP-Forward, its baseline."""

from fastdp.methods.ewft.autoencoder import (
    StackedAutoencoder as StackedAutoencoder,
    train_autoencoder as train_autoencoder,
)
from fastdp.methods.ewft.hooks import NoisePlace as NoisePlace
from fastdp.methods.ewft.noise import (
    NoiseSchedule as NoiseSchedule,
    dp_forward as dp_forward,
    paper as paper,
    paper_epoch_weighted as paper_epoch_weighted,
    release_once as release_once,
)
from fastdp.methods.ewft.pooled import Codebook as Codebook, codebook as codebook
from fastdp.methods.ewft.pure import PureEWFT as PureEWFT
from fastdp.methods.ewft.rehearsal import rehearse as rehearse
from fastdp.methods.ewft.releases import EWFT as EWFT, EWFTSettings as EWFTSettings
from fastdp.methods.removed import removed_from

__getattr__ = removed_from("ewft")
