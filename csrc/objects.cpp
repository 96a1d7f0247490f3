// What Python objects hold, compared with what they held before.
#include "bindings.h"

namespace fastdp {
namespace {

// Whether the values of dictionaries, one after another, are the very objects of a list; no, of anything but dictionaries.
bool same_values(const pybind11::tuple &tables, const pybind11::list &known) {
    const Py_ssize_t count = PyList_GET_SIZE(known.ptr());
    Py_ssize_t at = 0;
#if defined(__GNUC__)
    // After a pass none is in the cache, and each would be waited for.
    for (const auto &table : tables) __builtin_prefetch(table.ptr());
#endif
    for (const auto &table : tables) {
        if (!PyDict_Check(table.ptr())) return false;
        PyObject *value;
        for (Py_ssize_t place = 0; PyDict_Next(table.ptr(), &place, nullptr, &value); ++at)
            if (at == count || PyList_GET_ITEM(known.ptr(), at) != value) return false;
    }
    return at == count;
}

}  // namespace

void bind_objects(pybind11::module_ &m) { m.def("same_values", &same_values, pybind11::arg("tables"), pybind11::arg("known")); }

}  // namespace fastdp
