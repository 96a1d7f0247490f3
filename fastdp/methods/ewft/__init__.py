"""EW-FT: local differential privacy in the forward pass, with noise that follows the epoch; DP-Forward, its baseline."""

from fastdp.methods.ewft.autoencoder import StackedAutoencoder as StackedAutoencoder
from fastdp.methods.ewft.autoencoder import TrainedPrivately as TrainedPrivately
from fastdp.methods.ewft.autoencoder import train_autoencoder as train_autoencoder
from fastdp.methods.ewft.noise import NoiseSchedule as NoiseSchedule
from fastdp.methods.ewft.noise import dp_forward as dp_forward
from fastdp.methods.ewft.noise import epoch_weighted as epoch_weighted
from fastdp.methods.ewft.noise import paper as paper
from fastdp.methods.ewft.noise import paper_epoch_weighted as paper_epoch_weighted
from fastdp.methods.ewft.noise import paper_uniform as paper_uniform
from fastdp.methods.ewft.noise import release_once as release_once
from fastdp.methods.ewft.noise import shaped as shaped
from fastdp.methods.ewft.noise import uniform as uniform
from fastdp.methods.ewft.pooled import Codebook as Codebook
from fastdp.methods.ewft.pooled import PrivUnit as PrivUnit
from fastdp.methods.ewft.pooled import codebook as codebook
from fastdp.methods.ewft.pooled import privunit as privunit
from fastdp.methods.ewft.pure import PureEWFT as PureEWFT
from fastdp.methods.ewft.pure import PureSettings as PureSettings
from fastdp.methods.ewft.rehearsal import rehearse as rehearse
from fastdp.methods.ewft.releases import EWFT as EWFT
from fastdp.methods.ewft.releases import EWFTPerturbation as EWFTPerturbation
from fastdp.methods.ewft.settings import EWFTSettings as EWFTSettings
