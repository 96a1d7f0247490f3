"""Build of the one native extension; everything else is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import find_packages, setup

ParallelCompile("FASTDP_BUILD_JOBS", default=0).install()

# Instruction sets are chosen at run time (see csrc/cpu.h): the baseline here must run on any x86-64 or arm64 machine.
native = Pybind11Extension(
    "fastdp._native",
    sorted(str(path) for path in Path("csrc").glob("*.cpp")),
    include_dirs=["csrc"],
    depends=sorted(str(path) for path in Path("csrc").iterdir() if path.suffix in (".h", ".inc")),
    cxx_std=17,
    # Without contraction every instruction set rounds alike; kernels fuse where they say so.
    extra_compile_args=["-O3", "-ffp-contract=off", "-pthread", "-fvisibility=hidden"],
    extra_link_args=["-pthread"],
)

setup(
    packages=[
        *find_packages(include=["fastdp", "fastdp.*"]),
        "fastdp.kernels",
        "fastdp.bench",
        "fastdp.bench.attacks",
        "fastdp.bench.utility",
    ],
    ext_modules=[native],
)
