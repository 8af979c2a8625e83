// What PyTorch asks a CUDA build for: the guard of devices and streams, and the hooks.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "capture.h"
#include "errors.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace simulated_cuda {
namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

c10::Stream as_stream(int stream) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, stream);
}

int number_of(const c10::Stream& stream) {
  return static_cast<int>(stream.id());
}

Event& event_at(void* event) {
  return *static_cast<Event*>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(kDefaultStream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool is_high_priority) const override {
    return as_stream(next_pool_stream(is_high_priority));
  }
  c10::Stream getNewStream(c10::Device, int priority) const override { return as_stream(next_pool_stream(priority < 0)); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return as_stream(exchange_stream(number_of(stream))); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& stream) const override { return query_stream(number_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(number_of(stream)); }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    Lock lock(state_mutex());
    return capture_of(number_of(stream)) != nullptr;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_device(); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    simulated_cuda::record(event_at(*event), number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(event_at(event), number_of(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(event_at(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(event_at(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    return milliseconds_between(event_at(begin), event_at(end));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), number_of(stream));
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  void init() const override {}
  at::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return new_generator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return pinned_id(data) != 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  long versionCUDART() const override { return 0; }
  std::string showConfig() const override { return "  - CUDA is simulated on the CPU\n"; }
  void deviceSynchronize(at::DeviceIndex) const override { synchronize_device(); }
};

}  // namespace simulated_cuda

namespace at {
using simulated_cuda::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
