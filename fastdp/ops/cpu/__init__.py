"""What each op runs on a processor, by family: its arguments brought to the C++ kernels of ``csrc/``."""
