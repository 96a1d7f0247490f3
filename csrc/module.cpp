// The extension's table of contents: each kernel file binds its own functions.
#include "bindings.h"

PYBIND11_MODULE(_native, m) {
    m.doc() = "fastdp's CPU kernels; pointers, shapes and strides cross this boundary (see fastdp/ops)";
    fastdp::bind_cpu(m);
    fastdp::bind_normal(m);
    fastdp::bind_noise(m);
    fastdp::bind_clip(m);
    fastdp::bind_adamw(m);
    fastdp::bind_bounds(m);
    fastdp::bind_norms_direct(m);
    fastdp::bind_norms_gram(m);
    fastdp::bind_norms_onehot(m);
    fastdp::bind_sums(m);
    fastdp::bind_instances(m);
    fastdp::bind_snap(m);
    fastdp::bind_dchi(m);
    fastdp::bind_choice(m);
}
