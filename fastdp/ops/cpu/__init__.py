"""What each op runs on a processor, by family: its arguments brought to the C++ kernels of ``csrc/``."""

from . import instances as instances
from . import norms as norms
from . import sums as sums
