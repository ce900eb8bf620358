// A device of torch's kind for devices outside torch (PrivateUse1): memory of the host, which torch
// takes for another device's. Each operation is done by the CPU's kernel (at::native::cpu_fallback)
// when it is called, and refuses a tensor of the host among the device's, as CUDA's kernels do.
//
// What an operation, a copy or a collective writes is there as late as a program that waits for what
// it has to can bear: when its stream comes to that, which is when the host waits for the stream, or
// another operation in it reads. So what does not wait reads what was there before, each time.

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
#include <deque>
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

// --- streams: what is not written yet -------------------------------------------------------------

std::mutex guard;  // of all queues and maps
std::atomic<int64_t> unwritten{0};  // in all streams
std::vector<void*> ended;  // blocks, of which a stream that nobody recorded may read or write yet

// A stream's work in its order. What waits for a position of another stream waits for one that was
// issued before, so no two threads wait for each other.
struct Queue {
  std::mutex working;
  std::deque<std::function<void()>> waiting;
  std::atomic<int64_t> issued{0}, done{0};

  void put(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(guard);
    waiting.push_back(std::move(work));
    ++issued, ++unwritten;
  }
  // Do the work up to this position, on the host's thread.
  void reach(int64_t position) {
    if (done >= position) return;
    optional<pybind11::gil_scoped_release> released;  // who works may need it, to let a tensor go
    if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
    std::lock_guard<std::mutex> only(working);
    while (done < position) {
      std::unique_lock<std::mutex> lock(guard);
      auto work = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      struct Count {  // also where a collective fails
        std::atomic<int64_t>& done;
        ~Count() { ++done, --unwritten; }
      } count{done};
      work();
    }
    std::lock_guard<std::mutex> lock(guard);
    for (; unwritten == 0 && !ended.empty(); ended.pop_back()) std::free(ended.back());
  }
  void finish() { reach(issued); }
};

std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;

Queue& queue_of(DeviceIndex device, c10::StreamId stream) {
  std::lock_guard<std::mutex> lock(guard);
  return queues[{device, stream}];
}
Queue& queue_on(Device device) {
  auto index = device_of(device.index()).index();
  return queue_of(index, streams[index]);
}

struct Event {
  Queue* queue;
  int64_t position;
  void wait() const { queue->reach(position); }
};

// --- memory -------------------------------------------------------------------------------------

struct Block {
  size_t nbytes;
  std::vector<Queue*> used_in;  // on a device: that of its allocation, and others that were recorded
};
std::map<uintptr_t, Block> blocks, pinned;  // by their first address
std::atomic<int64_t> in_use{0}, peak{0};

void* take(std::map<uintptr_t, Block>& from, size_t nbytes, std::vector<Queue*> used_in) {
  void* data = nullptr;
  if (posix_memalign(&data, 512, nbytes)) throw std::bad_alloc();
  std::memset(data, FREED, nbytes);
  std::lock_guard<std::mutex> lock(guard);
  from[reinterpret_cast<uintptr_t>(data)] = {nbytes, std::move(used_in)};
  return data;
}

size_t give_back(std::map<uintptr_t, Block>& to, void* data) {
  std::unique_lock<std::mutex> lock(guard);
  auto block = to.extract(reinterpret_cast<uintptr_t>(data)).mapped();
  lock.unlock();
  std::vector<Event> before;
  for (auto* queue : block.used_in) before.push_back({queue, queue->issued});
  auto end = [before, data, nbytes = block.nbytes] {
    for (auto& event : before) event.wait();
    std::memset(data, FREED, nbytes);
    std::lock_guard<std::mutex> lock(guard);
    ended.push_back(data);
  };
  block.used_in.empty() ? end() : block.used_in[0]->put(end);  // in its stream's order, as all else
  return block.nbytes;
}

struct OnDevice final : c10::DeviceAllocator {
  static void release(void* data) {
    if (data) in_use -= give_back(blocks, data);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    auto rounded = (nbytes + 511) / 512 * 512;
    void* data = rounded ? take(blocks, rounded, {&queue_on(device_of(-1))}) : nullptr;
    in_use += rounded;
    peak = std::max(peak.load(), in_use.load());
    return {data, data, &release, device_of(-1)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* out, const void* in, size_t n) const override { std::memcpy(out, in, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    auto* queue = &queue_of(stream.device_index(), stream.id());
    std::lock_guard<std::mutex> lock(guard);
    auto block = blocks.find(reinterpret_cast<uintptr_t>(data.get()));
    if (block != blocks.end()) block->second.used_in.push_back(queue);
  }
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
    void* data = nbytes ? take(pinned, nbytes, {}) : nullptr;
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
    auto& queue = queue_of(on.device_index(), on.id());
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {&queue, queue.issued};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void block(void* event, const Stream& stream) const override {
    auto before = *static_cast<Event*>(event);
    queue_of(stream.device_index(), stream.id()).put([before] { before.wait(); });
  }
  // What is asked for again and again comes: the first answer is no.
  bool queryEvent(void* event) const override {
    auto asked = *static_cast<Event*>(event);
    auto is_done = asked.queue->done >= asked.position;
    asked.wait();
    return is_done;
  }
  bool queryStream(const Stream& stream) const override {
    auto& queue = queue_of(stream.device_index(), stream.id());
    Event now{&queue, queue.issued};
    return queryEvent(&now);
  }
  void synchronizeEvent(void* event) const override { static_cast<Event*>(event)->wait(); }
  void synchronizeStream(const Stream& on) const override { queue_of(on.device_index(), on.id()).finish(); }
  void synchronizeDevice(const DeviceIndex index) const override {
    std::vector<Queue*> all;
    std::unique_lock<std::mutex> lock(guard);
    for (auto& [key, queue] : queues)
      if (key.first == device_of(index).index()) all.push_back(&queue);
    lock.unlock();
    for (auto* queue : all) queue->finish();
  }
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
    return next != pinned.begin() && address < std::prev(next)->first + std::prev(next)->second.nbytes;
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
    if (auto kept = std::min(nbytes, storage.nbytes())) {
      queue_on(storage.device()).finish();
      std::memcpy(fresh.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
} hooks;

// --- operations ---------------------------------------------------------------------------------

// The same memory, which torch takes for the CPU's; as on a device, work to come does not hold it.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  auto result = at::from_blob(
      tensor.storage().mutable_data(), tensor.sizes(), tensor.strides(), tensor.storage_offset(),
      [](void*) {}, tensor.options().device(c10::kCPU), std::nullopt);
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

void copy_now(Tensor to, const Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView raw;
  at::native::copy_(to, from, false);
}

Tensor copy_from(const Tensor& self, const Tensor& out, bool non_blocking) {
  auto& queue = queue_on(is_ours(out) ? out.device() : self.device());
  auto from = on_cpu(self), to = on_cpu(out);
  auto& of_host = is_ours(out) ? self : out;
  auto waits = !is_ours(of_host) && !(non_blocking && of_host.is_pinned());
  if (waits && !is_ours(out)) {
    queue.finish();
    copy_now(to, from);
  } else {
    if (waits) from = self.clone();  // all operations come by here, with what the CPU has computed
    queue.put([from, to] { copy_now(to, from); });
  }
  return out;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& out) {
  at::native::resize_(out, self.sizes(), std::nullopt);
  return copy_from(self, out, false);
}

at::Scalar value_of(const Tensor& self) {
  queue_on(self.device()).finish();
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}
Tensor& set_tensor(Tensor& self, const Tensor& source) { return at::native::set_tensor_(self, source); }
Tensor& set_storage(Tensor& self, at::Storage source) { return at::native::set_(self, source); }
Tensor& set_part(Tensor& self, at::Storage source, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::cpu::set_(self, source, at, size, stride);
}
void record_stream(Tensor& self, Stream stream) { on_device.recordStream(self.storage().data_ptr(), stream); }
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

using Tensors = std::vector<Tensor>;

struct LateWork final : c10d::Work {
  c10::intrusive_ptr<c10d::Work> gloo;
  Event end;
  Tensors out;  // until it is waited for, as NCCL holds them

  LateWork(c10::intrusive_ptr<c10d::Work> gloo, Event end, Tensors out)
      : gloo(std::move(gloo)), end(end), out(std::move(out)) {}
  bool isCompleted() override { return gloo->isCompleted(); }
  bool isSuccess() const override { return gloo->isSuccess(); }
  std::exception_ptr exception() const override { return gloo->exception(); }
  bool wait(std::chrono::milliseconds) override {
    queue_on(device_of(-1)).put([end = end] { end.wait(); });
    out.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {  // DDP asks for it
    end.wait();
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    result->markCompleted(out);
    return result;
  }
};

// Gloo, on the device's tensors alone, as NCCL is: in a stream of its own, after the current one.
struct Collectives final : c10d::Backend {
  using Work = c10::intrusive_ptr<c10d::Work>;
  c10::intrusive_ptr<c10d::Backend> gloo;
  Queue& queue = queue_of(device_of(-1).index(), numbers++);

  explicit Collectives(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}

  // Copies, with which gloo works at once: what it writes is late.
  static Tensors all(const Tensors& tensors) {
    Tensors result;
    for (auto& tensor : tensors) {
      TORCH_CHECK(is_ours(tensor) && tensor.is_contiguous(), "a collective of a tensor on ", tensor.device());
      queue_on(tensor.device()).finish();
      result.push_back(on_cpu(tensor).clone());
    }
    return result;
  }
  Work late(Work work, const Tensors& out, const Tensors& written) {
    Tensors to;
    for (auto& tensor : out) to.push_back(on_cpu(tensor));
    queue.put([work, to, written] {
      work->wait();
      for (size_t k = 0; k < to.size(); ++k) copy_now(to[k], written[k]);
    });
    return c10::make_intrusive<LateWork>(work, Event{&queue, queue.issued}, out);
  }
  const std::string getBackendName() const override { return "mockccl"; }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto given = all(tensors);
    return late(gloo->broadcast(given, options), tensors, given);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto given = all(tensors);
    return late(gloo->allreduce(given, options), tensors, given);
  }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto given = all(in), outputs = all(out.at(0));
    std::vector<Tensors> written{outputs};
    return late(gloo->allgather(written, given, options), out[0], outputs);
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto given = all({out, in});
    return late(gloo->_allgather_base(given[0], given[1], options), {out}, given);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    Work last;
    for (size_t k = 0; k < out.size(); ++k) last = _allgather_base(out[k], in[k], options);
    return last;
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto given = all({out, in});
    return late(gloo->_reduce_scatter_base(given[0], given[1], options), {out}, given);
  }
  Work alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto given = all({out, in});
    return late(gloo->alltoall_base(given[0], given[1], out_sizes, in_sizes, options), {out}, given);
  }
  Work barrier(const c10d::BarrierOptions&) override {
    queue_on(device_of(-1)).finish();
    return gloo->barrier(c10d::BarrierOptions());
  }
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
  m.impl("record_stream", record_stream);
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
  m.def("synchronize", [] { Guard().synchronizeDevice(-1); }, py::call_guard<py::gil_scoped_release>());
  m.def("in_use", [] { return in_use.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = in_use.load(); });
  m.def("generator", [](int index) { return hooks.getDefaultGenerator(DeviceIndex(index)); });
  m.def("over_gloo", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(std::move(gloo));
  });
}
