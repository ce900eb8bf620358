// A device of torch's kind for devices outside torch (PrivateUse1): memory of the host, which torch
// takes for another device's. Each operation is done by the CPU's kernel (at::native::cpu_fallback)
// when it is called, and refuses a tensor of the host among the device's, as CUDA's kernels do.
//
// Streams and events have numbers and no order: tests/recorder has their order.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Stream;
using std::optional;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;
constexpr int64_t MEMORY = int64_t(8) << 30;
constexpr int FREED = 0xCD;  // what is read after its end, or before it is written, is no number

thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, DEVICES> streams{};
std::atomic<int64_t> numbers{1};

Device device_of(DeviceIndex index) { return Device(KIND, index < 0 ? current : index); }
bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

// --- memory -------------------------------------------------------------------------------------

std::mutex guard;
std::map<uintptr_t, size_t> blocks, pinned;  // bytes by their first address
std::atomic<int64_t> in_use{0}, peak{0};

void* take(std::map<uintptr_t, size_t>& from, size_t nbytes) {
  void* data = nullptr;
  if (posix_memalign(&data, 512, nbytes)) throw std::bad_alloc();
  std::memset(data, FREED, nbytes);
  std::lock_guard<std::mutex> lock(guard);
  from[reinterpret_cast<uintptr_t>(data)] = nbytes;
  return data;
}

size_t give_back(std::map<uintptr_t, size_t>& to, void* data) {
  std::unique_lock<std::mutex> lock(guard);
  auto nbytes = to.extract(reinterpret_cast<uintptr_t>(data)).mapped();
  lock.unlock();
  std::memset(data, FREED, nbytes);
  std::free(data);
  return nbytes;
}

struct OnDevice final : c10::DeviceAllocator {
  static void release(void* data) {
    if (data) in_use -= give_back(blocks, data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    auto rounded = (nbytes + 511) / 512 * 512;
    void* data = rounded ? take(blocks, rounded) : nullptr;
    in_use += rounded;
    peak = std::max(peak.load(), in_use.load());
    return {data, data, &release, device_of(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* out, const void* in, size_t n) const override { std::memcpy(out, in, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes})
      for (auto& stat : *each) stat.current = in_use, stat.peak = peak;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { peak = in_use.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override { return {MEMORY - in_use, MEMORY}; }
} on_device;

struct Pinned final : c10::Allocator {
  static void release(void* data) {
    if (data) give_back(pinned, data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes ? take(pinned, nbytes) : nullptr;
    return {data, data, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* out, const void* in, size_t n) const override { std::memcpy(out, in, n); }
} on_host;

// --- devices, streams, events, random numbers ---------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return device_of(-1); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < DEVICES, "there is no ", device);
    current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream stream(Device device, c10::StreamId id) const {
    return Stream(Stream::UNSAFE, device_of(device.index()), id);
  }
  Stream getStream(Device device) const override {
    return stream(device, streams[device_of(device.index()).index()]);
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, numbers++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    auto before = getStream(next.device());
    streams[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const Stream& on, const DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == on.device_index(), "an event of another device");
    *event = reinterpret_cast<void*>(numbers++);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(KIND, index);
    key_set_ = c10::DispatchKeySet(DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(KIND, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(KIND, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &on_host; }
  bool isPinnedPtr(const void* data) const override {
    auto address = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> lock(guard);
    auto next = pinned.upper_bound(address);
    return next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static auto all = [] {
      std::vector<at::Generator> made;
      for (int k = 0; k < DEVICES; ++k) made.push_back(at::make_generator<Generator>(k));
      return made;
    }();
    return all[device_of(index).index()];
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(device_of(index).index());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    const c10::DeviceGuard on(storage.device());
    auto fresh = on_device.allocate(nbytes);
    if (auto kept = std::min(nbytes, storage.nbytes()))
      std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
} hooks;

// --- operations ---------------------------------------------------------------------------------

// The same memory, which torch takes for the CPU's.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto result = at::from_blob(
      tensor.storage().mutable_data(), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
      [tensor](void*) {}, tensor.options().device(c10::kCPU), std::nullopt);
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

Tensor empty(
    at::IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
    optional<bool>, optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &on_device, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<Device> device, optional<bool>) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &on_device, c10::DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<c10::SymInt> at) {
  return at::cpu::as_strided_symint(self, size, stride, at);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor copy_from(const Tensor& self, const Tensor& out, bool non_blocking) {
  auto to = on_cpu(out);
  at::native::copy_(to, on_cpu(self), non_blocking);
  return out;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& out) {
  at::native::resize_(out, self.sizes(), std::nullopt);
  return copy_from(self, out, false);
}

at::Scalar value_of(const Tensor& self) { return at::native::_local_scalar_dense_cpu(on_cpu(self)); }
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_part(Tensor& self, at::Storage source, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, at, size, stride);
}
bool may_take_data(const Tensor&, const Tensor&) { return true; }  // as CUDA's may take the CPU's

void check_place(const std::string& name, const Tensor& tensor) {
  // A number that a tensor of the host holds is a number; indices may be the host's.
  auto may_be_host = tensor.dim() == 0 || name.find("index") != std::string::npos;
  TORCH_CHECK(
      !tensor.defined() || is_ours(tensor) || may_be_host, name, ": a tensor of ", tensor.sizes(), " is on ",
      tensor.device(), ", and others are on the device");
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = op.schema().name();
  std::vector<std::pair<at::Generator, at::Generator>> generators;  // ours, and the CPU's for it
  auto first = stack->end() - op.schema().arguments().size();
  for (auto each = first; each != stack->end(); ++each) {
    auto& value = *each;
    if (value.isTensor()) check_place(name, value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorList()) check_place(name, tensor);
    if (value.isGenerator() && value.toGenerator().device().type() == KIND) {
      generators.emplace_back(value.toGenerator(), at::detail::createCPUGenerator());
      generators.back().second.set_state(generators.back().first.get_state());
      value = generators.back().second;
    }
  }
  at::native::cpu_fallback(op, stack);
  for (auto& [ours, used] : generators) ours.set_state(used.get_state());
}

// --- collectives --------------------------------------------------------------------------------

// Gloo, on the device's tensors alone, as NCCL is.
struct Collectives final : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  c10::intrusive_ptr<c10d::Backend> gloo;

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}

  static Tensors all(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor) && tensor.is_contiguous(), "a collective of a tensor on ", tensor.device());
      result.push_back(on_cpu(tensor));
    }
    return result;
  }
  const std::string getBackendName() const override { return "mockccl"; }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto given = all(tensors);
    return gloo->broadcast(given, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto given = all(tensors);
    return gloo->allreduce(given, options);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> outputs;
    for (auto& each : out) outputs.push_back(all(each));
    auto given = all(in);
    return gloo->allgather(outputs, given, options);
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto given = all({out, in});
    return gloo->_allgather_base(given[0], given[1], options);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    Work last;
    for (size_t k = 0; k < out.size(); ++k) last = _allgather_base(out[k], in[k], options);
    return last;
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto given = all({out, in});
    return gloo->_reduce_scatter_base(given[0], given[1], options);
  }
  Work alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto given = all({out, in});
    return gloo->alltoall_base(given[0], given[1], out_sizes, in_sizes, options);
  }
  Work barrier(const c10d::BarrierOptions&) override { return gloo->barrier(c10d::BarrierOptions()); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override {}
  void shutdown() override {}
};

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize_);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("alias", TORCH_FN(at::native::alias));
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", value_of);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("_has_compatible_shallow_copy_type", may_take_data);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(mock_device, m) {
  c10::SetAllocator(KIND, &on_device);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(KIND, DeviceIndex(index))); });
  m.def("in_use", [] { return in_use.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = in_use.load(); });
  m.def("generator", [](int index) { return hooks.getDefaultGenerator(DeviceIndex(index)); });
  m.def("over_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
}
