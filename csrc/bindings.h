// The way from Python to a kernel: each file binds its own functions, and module.cpp calls them all.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "chacha.h"
#include "factor.h"

namespace fastdp {

// Memory as Python gives it: a tensor or an array, which the call keeps alive, an address, or None.
struct Memory {
    uintptr_t address;
};

}  // namespace fastdp

template <>
struct pybind11::detail::type_caster<fastdp::Memory> {
    PYBIND11_TYPE_CASTER(fastdp::Memory, const_name("Memory"));

    bool load(handle given, bool) {
        if (given.is_none()) value.address = 0;
        else if (PyLong_Check(given.ptr())) value.address = PyLong_AsSize_t(given.ptr());
        else if (PyObject_CheckBuffer(given.ptr())) value.address = reinterpret_cast<uintptr_t>(
            reinterpret_borrow<buffer>(given).request().ptr);
        else {
            static PyObject *const method = PyUnicode_InternFromString("data_ptr");
            const object found = reinterpret_steal<object>(PyObject_CallMethodNoArgs(given.ptr(), method));
            if (!found) PyErr_Clear();
            else value.address = PyLong_AsSize_t(found.ptr());
            return static_cast<bool>(found);
        }
        return true;
    }
};

namespace fastdp {

// What Python gives for an argument, and what a kernel takes: pointers and positions come as memory, enumerations as
// numbers, factors as tuples, and all else as it is.
template <typename T, typename = void>
struct Argument {
    using Given = T;
    static T take(T given) { return given; }
};
template <typename T>
struct Argument<T *> {
    using Given = Memory;
    static T *take(Memory at) { return reinterpret_cast<T *>(at.address); }
};
template <typename T>
struct Argument<T, std::enable_if_t<std::is_enum_v<T>>> {
    using Given = int;
    static T take(int number) { return static_cast<T>(number); }
};
// A position, if it says how noise is made: whoever asked for it must not get the words of fewer rounds, or of none.
inline const Position &checked(const Position &position) {
    if (position.double_rounds != 10 && position.double_rounds != 6)
        throw std::invalid_argument("a position says 10 double rounds of ChaCha, or 6, not " +
                                    std::to_string(position.double_rounds));
    return position;
}
template <>
struct Argument<const Position &> {
    using Given = Memory;
    static const Position &take(Memory at) { return checked(*reinterpret_cast<const Position *>(at.address)); }
};
template <>
struct Argument<const Factor &> {
    using Given = const FactorTuple &;
    static Factor take(Given tuple) { return factor_of(tuple); }
};
template <>
struct Argument<const std::vector<Factor> &> {
    using Given = const std::vector<FactorTuple> &;
    static std::vector<Factor> take(Given tuples) {
        std::vector<Factor> factors;
        for (const auto &tuple : tuples) factors.push_back(factor_of(tuple));
        return factors;
    }
};

// A kernel, or a member of a class, as a function of what Python gives; others may hold Python's lock while it runs.
template <typename R, typename... A>
auto from_python(R (*kernel)(A...)) {
    return [kernel](typename Argument<A>::Given... given) {
        pybind11::gil_scoped_release unlocked;
        return kernel(Argument<A>::take(given)...);
    };
}
template <typename C, typename... A>
auto from_python(void (C::*member)(A...)) {
    return [member](C &self, typename Argument<A>::Given... given) {
        pybind11::gil_scoped_release unlocked;
        (self.*member)(Argument<A>::take(given)...);
    };
}

// Makes a kernel a function of the extension, its arguments under these names.
template <typename R, typename... A, typename... Names>
void bind(pybind11::module_ &m, const char *name, R (*kernel)(A...), Names... names) {
    m.def(name, from_python(kernel), pybind11::arg(names)...);
}

// Every file that binds functions, each by a bind_FILE.
#define FASTDP_FILES(each)                                                                                              \
    each(cpu) each(normal) each(noise) each(clip) each(adamw) each(bounds) each(norms_direct) each(norms_gram)           \
        each(norms_onehot) each(sums) each(instances) each(snap) each(dchi) each(choice) each(objects)
#define FASTDP_DECLARED(file) void bind_##file(pybind11::module_ &m);
FASTDP_FILES(FASTDP_DECLARED)

}  // namespace fastdp
