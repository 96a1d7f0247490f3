// One declaration a kernel file; module.cpp calls them all.
#pragma once
#include <pybind11/pybind11.h>

namespace fastdp {
void bind_cpu(pybind11::module_ &m);
void bind_normal(pybind11::module_ &m);
void bind_noise(pybind11::module_ &m);
void bind_clip(pybind11::module_ &m);
void bind_adamw(pybind11::module_ &m);
void bind_bounds(pybind11::module_ &m);
void bind_norms_direct(pybind11::module_ &m);
void bind_norms_gram(pybind11::module_ &m);
void bind_norms_onehot(pybind11::module_ &m);
void bind_sums(pybind11::module_ &m);
void bind_instances(pybind11::module_ &m);
void bind_snap(pybind11::module_ &m);
void bind_dchi(pybind11::module_ &m);
void bind_choice(pybind11::module_ &m);
}  // namespace fastdp
