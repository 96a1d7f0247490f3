"""DP-FROST: fine-tuning with freezing, where the partitions to train are chosen by noisy gradient magnitudes."""

from fastdp.methods.frost.estimate import estimate_magnitudes as estimate_magnitudes
from fastdp.methods.frost.method import DPFrost as DPFrost
from fastdp.methods.frost.partitions import Partition as Partition, split as split
from fastdp.methods.frost.selection import select_partitions as select_partitions
from fastdp.methods.frost.sigma import compute_sigma as compute_sigma
