// One declaration a kernel file; module.cpp calls them all.
#pragma once
#include <pybind11/pybind11.h>

namespace fastdp {
void bind_cpu(pybind11::module_ &m);
void bind_noise(pybind11::module_ &m);
}  // namespace fastdp
