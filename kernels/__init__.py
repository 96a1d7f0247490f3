"""Triton kernels for CUDA devices, one file a kernel; installed as `fastdp.kernels`.

Importing this package imports nothing else: a program started in the repository root has this folder on its path
under the name `kernels`, which transformers looks for and would import.
"""
