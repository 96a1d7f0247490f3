// A device whose memory is the host's. The processor computes for it; what CUDA would not mix with the host's tensors is refused.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>

using at::IntArrayRef, at::Tensor, c10::DispatchKey, c10::IValue, c10::Storage;
using Maybe = std::optional<Tensor>;
using Boxed = torch::CppFunction;

namespace {
const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0), HOST(c10::DeviceType::CPU);
at::Generator drawing;  // where a call names no generator

// The memory of a storage as another device's; it lives as long as either.
Storage shared(const Storage& storage, c10::Device device) {
  c10::DataPtr memory(storage.mutable_data(), new Storage(storage), [](void* held) { delete static_cast<Storage*>(held); }, device);
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetAllocator(device.type()), true);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return shared(Storage(Storage::use_byte_size_t(), size, c10::GetCPUAllocator(), true), DEVICE).set_data_ptr({});
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  Generator() { device_ = DEVICE, key_set_ = c10::DispatchKeySet(DispatchKey::PrivateUse1); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
} hooks;

// While it lives, the processor draws what the device would.
struct Draws {
  at::Generator own, host = at::detail::getDefaultCPUGenerator();
  Tensor before = host.get_state();
  explicit Draws(at::Generator g) : own(std::move(g)) { host.set_state(own.get_state()); }
  ~Draws() { own.set_state(host.get_state()), host.set_state(before); }
};

Tensor placed(const Tensor& t, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.dim() == 0) made.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
  return made;
}

// One call: its tensors as the processor sees them, and its results as the device does.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> tensors;  // as given, and as the processor sees them
  std::map<c10::StorageImpl*, Storage> on_host, on_device;
  bool here = false;

  Tensor to_host(const Tensor& t) {
    for (auto& [given, seen] : tensors)
      if (given.is_same(t)) return seen;
    auto seen = t;
    if (t.defined() && t.device() == DEVICE) {
      here = true;
      auto& storage = on_host[t.storage().unsafeGetStorageImpl()];
      if (!storage) storage = shared(t.storage(), HOST);
      on_device[storage.unsafeGetStorageImpl()] = t.storage();
      seen = placed(t, storage, DispatchKey::CPU);
    }
    return tensors.emplace_back(t, seen).second;
  }

  Tensor to_device(const Tensor& t) {
    if (!t.defined() || !here) return t;
    for (auto& [given, seen] : tensors)
      if (seen.is_same(t)) return given;
    auto& storage = on_device[t.storage().unsafeGetStorageImpl()];
    if (!storage) storage = shared(t.storage(), DEVICE);
    return placed(t, storage, DispatchKey::PrivateUse1);
  }

  // What an operation did to sizes and memory of its arguments.
  void write_back() {
    for (auto& [given, seen] : tensors) {
      if (given.is_same(seen)) continue;
      if (seen.storage().data() != given.storage().data()) {
        auto grown = shared(seen.storage(), DEVICE);
        given.storage().set_nbytes(grown.nbytes());
        given.storage().set_data_ptr(grown.set_data_ptr({}));
      }
      if (seen.sizes() != given.sizes() || seen.strides() != given.strides() || seen.storage_offset() != given.storage_offset())
        given.unsafeGetTensorImpl()->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
    }
  }
};

template <class F>
void map(IValue& value, F change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(change(t));
    value = made;
  } else if (value.isOptionalTensorList()) {
    c10::List<Maybe> made;
    for (const Maybe& t : value.toOptionalTensorList()) made.push_back(t ? Maybe(change(*t)) : t);
    value = made;
  }
}

void refuse_mixing(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto value = arguments[i];
    // A device reads the host's numbers, and its indices.
    if (value.isOptionalTensorList() && arguments[0].toTensor().device() == DEVICE) continue;
    const auto* alias = schema.arguments()[i].alias_info();
    const bool strict = value.isTensorList() || (alias && alias->isWrite()) || schema.name() == "aten::equal";
    map(value, [&](const Tensor& t) {
      TORCH_CHECK(!t.defined() || t.device() == DEVICE || (t.dim() == 0 && !strict),
        "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu! (argument ",
        schema.arguments()[i].name(), " of ", schema.name(), ")");
      return t;
    });
  }
}

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const std::vector<IValue> given(stack->end() - schema.arguments().size(), stack->end());
  Call call;
  std::optional<at::Generator> generator;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) generator = drawing;
  for (size_t i = stack->size() - given.size(); i < stack->size(); ++i)
    map((*stack)[i], [&](const Tensor& t) { return call.to_host(t); });
  if (call.here) refuse_mixing(schema, given);
  for (size_t i = stack->size() - given.size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().type() == DEVICE.type()) {
      value = HOST, call.here = true;
    } else if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(generator->device() == DEVICE, "Expected a 'pretend' device type for generator but found 'cpu'");
      value = IValue();
    }
  }
  std::optional<Draws> draws;
  if (generator) draws.emplace(*generator);
  op.callBoxed(stack);
  call.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    map((*stack)[i], [&](const Tensor& t) { return call.to_device(t); });
}

Tensor copy(const Tensor& from, const Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call call;
  call.to_host(to).copy_(call.to_host(from));
  return to;
}

Tensor& set_part(Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
Tensor& set_all(Tensor& self, Storage s) { return set_part(self, s, 0, {static_cast<int64_t>(s.nbytes() / self.itemsize())}, {1}); }

// Fused attention of the processor is none of the device's, and a parameter that moves stays the same object.
int64_t plain(const Tensor&, const Tensor&, const Tensor&, const Maybe&, double, bool, std::optional<double>, bool) { return 0; }
bool can_move(const Tensor&, const Tensor&) { return true; }

// Torch asks devices for these two; autograd differentiates their parts.
std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& x, const Tensor& h, const Tensor& c, const Maybe& a, const Maybe& b) {
  const auto gates = (a ? x + h + *a + *b : x + h).chunk(4, 1);
  auto next = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next, next};
}
std::tuple<Tensor, Tensor> gru(const Tensor& x, const Tensor& y, const Tensor& h, const Maybe& a, const Maybe& b) {
  const auto in = (a ? x + *a : x).chunk(3, 1), own = (b ? y + *b : y).chunk(3, 1);
  auto next = (in[2] + (in[0] + own[0]).sigmoid() * own[2]).tanh();
  return {next + (in[1] + own[1]).sigmoid() * (h - next), next};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(Boxed::makeFromBoxedFunction<&compute>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (auto name : {"convolution", "convolution_backward"}) m.impl(name, Boxed::makeFromBoxedFunction<&compute>());
  m.impl("_copy_from", copy);
  m.impl("set_.source_Storage", set_all);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("_fused_sdp_choice", plain);
  m.impl("_has_compatible_shallow_copy_type", can_move);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_thnn_fused_lstm_cell", lstm), m.impl("_thnn_fused_gru_cell", gru); }
TORCH_LIBRARY(pretend, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  drawing = at::make_generator<Generator>();
  m.def("generator() -> Generator?", [] { return drawing; });
}
}  // namespace
