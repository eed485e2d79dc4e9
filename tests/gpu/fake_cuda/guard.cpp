// A CUDA device without a GPU, for a CPU build of PyTorch. The device guard and the hooks below answer every question
// and do nothing, so tensors without memory can be on "cuda": sliced, moved, and differentiated by autograd's own
// threads. Nothing can be computed on it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device kOnly(c10::DeviceType::CUDA, 0);

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kOnly; }
  Device getDevice() const override { return kOnly; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, kOnly); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kOnly); }
  // Events are never looked into: any address but null will do.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Device*>(&kOnly);
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new NoGuard());

} // namespace

namespace at {

struct NoHooks final : CUDAHooksInterface {
  explicit NoHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", NoHooks)

} // namespace at
