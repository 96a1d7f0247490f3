// The extension's table of contents: each kernel file binds its own functions.
#include "bindings.h"

PYBIND11_MODULE(_native, m) {
    m.doc() = "fastdp's CPU kernels; pointers, shapes and strides cross this boundary (see fastdp/ops)";
#define FASTDP_BOUND(file) fastdp::bind_##file(m);
    FASTDP_FILES(FASTDP_BOUND)
}
