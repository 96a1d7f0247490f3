// The extension's table of contents: each kernel file binds its own functions.
#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_native, m) {
    m.doc() = "fastdp's CPU kernels; pointers, shapes and strides cross this boundary (see fastdp/ops)";
    fastdp::bind_cpu(m);
    fastdp::bind_noise(m);
    fastdp::bind_clip_noise(m);
    fastdp::bind_adamw(m);
    fastdp::bind_direct_norms(m);
    fastdp::bind_gram_norms(m);
    fastdp::bind_onehot_norms(m);
    fastdp::bind_instances(m);
    fastdp::bind_snap(m);
    fastdp::bind_snap_noise(m);
    fastdp::bind_exponential(m);
}
