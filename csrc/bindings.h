// One declaration a kernel file; module.cpp calls them all.
#pragma once
#include <pybind11/pybind11.h>

namespace fastdp {
void bind_cpu(pybind11::module_ &m);
void bind_noise(pybind11::module_ &m);
void bind_clip_noise(pybind11::module_ &m);
void bind_adamw(pybind11::module_ &m);
void bind_direct_norms(pybind11::module_ &m);
void bind_gram_norms(pybind11::module_ &m);
void bind_onehot_norms(pybind11::module_ &m);
void bind_instances(pybind11::module_ &m);
void bind_snap(pybind11::module_ &m);
void bind_snap_noise(pybind11::module_ &m);
void bind_exponential(pybind11::module_ &m);
}  // namespace fastdp
