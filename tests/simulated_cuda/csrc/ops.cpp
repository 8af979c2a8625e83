// Ops on the simulated device: a handful of kernels for memory and copies, and one boxed fallback for everything else.
//
// The fallback runs PyTorch's CPU kernels on the same memory, when the task runs. What an op returns must be allocated
// when it is issued, so the shapes come from its Meta kernel. A view is made at once. An op whose result depends on data
// (`item`, `nonzero`) synchronizes its stream, as on CUDA.

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "capture.h"
#include "errors.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace simulated_cuda {
namespace {

using at::Tensor;
using torch::jit::Stack;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// Kernels run below autograd, autocast and modes: what those do has been done when an op gets here.
struct BelowModes {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({
          c10::DispatchKey::Python,
          c10::DispatchKey::PythonTLSSnapshot,
          c10::DispatchKey::PythonDispatcher,
          c10::DispatchKey::Functionalize,
          c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
          c10::DispatchKey::FuncTorchDynamicLayerBackMode,
      })};
};

Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(
      sizes, strides, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

// The memory of a tensor, as a CPU tensor. It holds no reference, as a kernel of CUDA holds none.
Tensor alias_of(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU)), nullptr, /*resizable=*/false);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  result._set_conj(tensor.is_conj());
  result._set_neg(tensor.is_neg());
  return result;
}

// Checks, when a task runs, that the memory it was issued with is still there. Eager tasks always find it: memory is
// returned after a synchronization. Replays may not.
struct Memory {
  std::vector<std::pair<const void*, size_t>> device;
  std::vector<uint64_t> host;

  void add(const Tensor& tensor) {
    if (tensor.is_cuda() && tensor.storage().nbytes() > 0) {
      device.emplace_back(tensor.storage().data(), tensor.storage().nbytes());
    }
  }
  void check() const {
    for (auto [address, num_bytes] : device) {
      if (!is_mapped(address, num_bytes)) fail(Status::illegal_address, "device memory was freed");
    }
    for (uint64_t id : host) {
      if (!is_still_pinned(id)) fail(Status::illegal_address, "pinned memory was freed");
    }
  }
};

// --- copies

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  BelowModes guard;
  if (self.numel() == 0 || self.is_same(source)) return self;
  TORCH_CHECK(!self.is_meta() && !source.is_meta(), "Cannot copy out of meta tensor; no data!");
  int stream = current_stream();
  bool crosses = self.is_cpu() || source.is_cpu();
  const Tensor& on_host = self.is_cpu() ? self : source;
  uint64_t pinned = crosses ? pinned_id(on_host.storage().data()) : 0;
  bool is_asynchronous = !crosses || (non_blocking && pinned);
  if (crosses && capture_of(stream) && !is_asynchronous) forbid_in_capture(stream);

  Memory memory;
  memory.add(self);
  memory.add(source);
  // Pinned memory is read and written when the task runs, and nobody holds it. Pageable memory is read now: CUDA copies
  // it to a buffer of its own before the call returns.
  Tensor from = source.is_cuda() || is_asynchronous ? alias_of(source) : non_blocking ? source.clone() : source;
  Tensor to = self.is_cuda() || is_asynchronous ? alias_of(self) : self;
  if (crosses && is_asynchronous) memory.host.push_back(pinned);
  issue(stream, Task{"copy_", [=](const Launch&) {
    memory.check();
    BelowModes guard;
    at::NoGradGuard no_grad;
    to.copy_(from);
  }});
  if (crosses && is_asynchronous) record_host_use(pinned, stream);
  // From pageable memory a call may return before the copy; into it, it never does.
  bool returns_early = is_asynchronous || (non_blocking && source.is_cpu());
  if (!returns_early) synchronize_stream(stream);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor result = target;
  return copy_(result, self, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// --- memory

Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device>, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "only strided tensors are simulated");
  return at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  TORCH_CHECK(source.device() == kDevice, "expected a storage on ", kDevice, ", got one on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.data() == nullptr && sizes.size() > 0) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  int64_t stride = 1;
  return set_storage(self, std::move(source), 0, size, stride);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  return set_tensor(self, empty_on_device({0}, {1}, self.scalar_type()));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> memory_format) {
  if (self.sizes() == sizes) return self;
  Tensor larger = at::detail::empty_generic(
      sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), self.scalar_type(), memory_format);
  auto* impl = self.unsafeGetTensorImpl();
  size_t needed = self.storage_offset() * self.itemsize() + larger.numel() * self.itemsize();
  if (needed > self.storage().nbytes()) {
    c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
    c10::DataPtr data = device_allocator()->allocate(needed);
    void* target = data.get();
    const void* source = storage->data();
    size_t num_bytes = std::min(storage->nbytes(), needed);
    if (num_bytes > 0) {
      issue(current_stream(), Task{"resize_", [=](const Launch&) { std::memmove(target, source, num_bytes); }});
    }
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  impl->set_sizes_and_strides(larger.sizes(), larger.strides(), self.storage_offset());
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr().get(), static_cast<int>(stream.id()));
}

// --- everything else

// cuBLAS has a workspace for each thread and stream. The first product of matrices allocates it, and each writes to it.
std::map<std::pair<std::thread::id, int>, Tensor>& workspaces() {
  static auto* workspaces = new std::map<std::pair<std::thread::id, int>, Tensor>;
  return *workspaces;
}

bool is_product(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
  return names.count(op.operator_name().name) > 0;
}

Tensor workspace_of(int stream) {
  Lock lock(state_mutex());
  Tensor& workspace = workspaces()[{std::this_thread::get_id(), stream}];
  if (!workspace.defined()) workspace = empty_on_device({128}, {1}, at::kFloat);
  return workspace;
}

struct OpInfo {
  bool is_view = false;
  bool is_random = false;
  bool reads_back = false;          // the result depends on data
  bool is_indexing = false;
  std::vector<int> written;         // by return: the argument that it is, or -1 if it is new
  std::vector<bool> is_written;     // by argument
};

const OpInfo& info_of(const c10::OperatorHandle& op) {
  static std::unordered_map<std::string, OpInfo> infos;
  std::string name = c10::toString(op.operator_name());
  Lock lock(state_mutex());
  auto [it, is_new] = infos.try_emplace(name);
  OpInfo& info = it->second;
  if (!is_new) return info;
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    info.is_written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    int written = -1;
    if (alias && alias->isWrite()) {
      for (size_t index = 0; index < schema.arguments().size(); ++index) {
        const auto* other = schema.arguments()[index].alias_info();
        if (other && other->isWrite() && other->beforeSets() == alias->beforeSets()) written = static_cast<int>(index);
      }
    } else if (alias) {
      info.is_view = true;
    }
    info.written.push_back(written);
    auto type = result.type();
    bool is_tensor = type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
    info.reads_back |= !is_tensor;
  }
  info.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  info.reads_back |= op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  info.is_indexing = name.find("index") != std::string::npos;
  return info;
}

// Calls `replace` on each tensor of a stack's value, and returns the value with the results in their place.
template <typename Replace>
c10::IValue map_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) {
    const Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(replace(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? replace(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& entry : value.toOptionalTensorList().vec()) {
      list.push_back(entry && entry->defined() ? std::optional<Tensor>(replace(*entry)) : entry);
    }
    return list;
  }
  return value;
}

Stack map_stack(const Stack& stack, const std::function<Tensor(const Tensor&)>& replace, c10::DeviceType device) {
  // One tensor that is passed twice stays one: kernels look at that.
  std::unordered_map<const c10::TensorImpl*, Tensor> replaced;
  auto once = [&](const Tensor& tensor) {
    auto [it, is_new] = replaced.try_emplace(tensor.unsafeGetTensorImpl());
    if (is_new) it->second = replace(tensor);
    return it->second;
  };
  Stack result;
  result.reserve(stack.size());
  for (const auto& value : stack) {
    bool is_own_device = value.isDevice() && value.toDevice().is_cuda();
    result.push_back(is_own_device ? c10::IValue(c10::Device(device)) : map_tensors(value, once));
  }
  return result;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// One thread of the CPU computes, whichever thread of the host comes to run a task, and however many threads that is to
// use: sums of several threads have other bits.
struct OneThread {
  int num_before = at::get_num_threads();
  OneThread() {
    if (num_before != 1) at::set_num_threads(1);
  }
  ~OneThread() {
    if (num_before != 1) at::set_num_threads(num_before);
  }
};

// The kernel of dropout takes no generator, and to exchange the state of the default one would disturb what another
// thread draws on the CPU meanwhile.
Stack dropout(const Stack& arguments, const at::Generator& generator) {
  const Tensor& input = arguments[0].toTensor();
  double keep = 1 - arguments[1].toDouble();
  bool is_training = arguments[2].isNone() || arguments[2].toBool();
  Tensor mask = at::ones_like(input, input.options().dtype(at::kBool));
  if (!is_training) return {input.clone(), mask};
  mask.bernoulli_(keep, generator);
  return {input.mul(mask).mul_(keep == 0 ? 0 : 1 / keep), mask};
}

// The arguments of an op as its CPU kernel gets them, and its part of the random numbers.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  std::optional<Draw> random;
  int generator_argument = -1;

  Stack run(const Launch& launch) const {
    BelowModes guard;
    OneThread one_thread;
    at::NoGradGuard no_grad;
    Stack stack = arguments;
    if (!random) {
      run_on_cpu(op, stack);
      return stack;
    }
    uint64_t seed = random->cpu_seed(launch);
    if (generator_argument >= 0) {
      stack[generator_argument] = c10::IValue(at::detail::createCPUGenerator(seed));
      run_on_cpu(op, stack);
      return stack;
    }
    if (op.operator_name().name == "aten::native_dropout") return dropout(stack, at::detail::createCPUGenerator(seed));
    // The kernel draws from the CPU's default generator, which it must not change.
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(cpu);
    at::mt19937 before = impl->engine();
    auto next_float = impl->next_float_normal_sample();
    auto next_double = impl->next_double_normal_sample();
    auto restore = [&] {
      impl->set_engine(before);
      impl->set_next_float_normal_sample(next_float);
      impl->set_next_double_normal_sample(next_double);
    };
    impl->set_engine(at::mt19937(seed));
    impl->set_next_float_normal_sample({});
    impl->set_next_double_normal_sample({});
    try {
      run_on_cpu(op, stack);
    } catch (...) {
      restore();
      throw;
    }
    restore();
    return stack;
  }
};

bool is_host_scalar(const Tensor& tensor) {
  return tensor.is_cpu() && tensor.dim() == 0;
}

Tensor for_cpu(const Tensor& tensor) {
  if (tensor.is_cuda()) return alias_of(tensor);
  Tensor value = tensor.clone();  // CUDA gets it as an argument of the kernel, at the launch
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) value.unsafeGetTensorImpl()->set_wrapped_number(true);
  return value;
}

Tensor for_meta(const Tensor& tensor) {
  if (is_host_scalar(tensor)) return tensor;  // shapes may depend on its type, and Meta kernels take it as it is
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
}

Tensor zeros_like_on_cpu(const Tensor& tensor) {
  return at::zeros(tensor.sizes(), tensor.options().device(at::kCPU)).as_strided(tensor.sizes(), at::detail::defaultStrides(tensor.sizes()));
}

// All that the shapes of results can depend on.
std::string signature_of(const c10::OperatorHandle& op, const Stack& arguments) {
  std::ostringstream out;
  out << op.operator_name();
  for (const auto& value : arguments) {
    bool has_tensors = false;
    map_tensors(value, [&](const Tensor& tensor) {
      has_tensors = true;
      out << '|' << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.is_cuda()
          << tensor.unsafeGetTensorImpl()->is_wrapped_number();
      return tensor;
    });
    if (!has_tensors) out << '|' << value.tagKind();
    if (!has_tensors && !value.isGenerator()) out << value;
  }
  return out.str();
}

Stack infer_results_anew(const c10::OperatorHandle& op, const Stack& arguments) {
  BelowModes guard;
  at::NoGradGuard no_grad;
  if (op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    Stack stack = map_stack(arguments, for_meta, c10::DeviceType::Meta);
    for (auto& value : stack) {
      if (value.isGenerator()) value = c10::IValue();
    }
    try {
      op.callBoxed(&stack);
      return stack;
    } catch (const c10::NotImplementedError&) {
    }
  }
  Stack stack = map_stack(arguments, zeros_like_on_cpu, c10::DeviceType::CPU);
  for (auto& value : stack) {
    if (value.isGenerator()) value = c10::IValue();
  }
  run_on_cpu(op, stack);
  return stack;
}

// Returns tensors with the shapes of what the op will return. They are stored: many Meta kernels are written in Python, and
// take a hundred times as long as the op itself.
Stack infer_results(const c10::OperatorHandle& op, const Stack& arguments) {
  static std::unordered_map<std::string, Stack> inferred;
  std::string signature = signature_of(op, arguments);
  {
    Lock lock(state_mutex());
    auto entry = inferred.find(signature);
    if (entry != inferred.end()) return entry->second;
  }
  Stack results = infer_results_anew(op, arguments);  // without the lock: it may wait for the interpreter's
  Lock lock(state_mutex());
  if (inferred.size() > 20000) inferred.clear();
  return inferred[signature] = results;
}

void check_devices(const c10::OperatorHandle& op, const OpInfo& info, const Stack& arguments) {
  bool has_host_tensor = false;
  for (const auto& value : arguments) {
    map_tensors(value, [&](const Tensor& tensor) {
      TORCH_CHECK(tensor.is_cuda() || tensor.is_cpu(), "expected CUDA or CPU tensors, got one on ", tensor.device());
      has_host_tensor |= tensor.is_cpu() && !is_host_scalar(tensor);
      return tensor;
    });
  }
  if (!has_host_tensor) return;
  TORCH_CHECK(
      info.is_indexing, "Expected all tensors to be on the same device, but entry at least two devices, ", kDevice,
      " and cpu! (when calling ", op.operator_name(), ")");
  synchronize_stream(current_stream());  // copies them from pageable memory
}

Tensor view_on_device(const Tensor& base, const Tensor& view) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  result._set_conj(view.is_conj());
  result._set_neg(view.is_neg());
  return result;
}

void make_view(const c10::OperatorHandle& op, Stack* stack, Stack arguments) {
  Tensor base;
  for (const auto& value : arguments) {
    if (value.isTensor() && !base.defined()) base = value.toTensor();
  }
  Stack cpu = map_stack(arguments, alias_of, c10::DeviceType::CPU);
  run_on_cpu(op, cpu);
  for (const auto& value : cpu) {
    stack->push_back(map_tensors(value, [&](const Tensor& view) { return view_on_device(base, view); }));
  }
}

// Masks as indices: CUDA first counts what they select, unless a single value is written there.
bool counts_selected(const OpInfo& info, const Stack& arguments) {
  if (!info.is_indexing) return false;
  bool has_mask = false;
  for (const auto& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const auto& index : value.toOptionalTensorList().vec()) {
      has_mask |= index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    }
  }
  bool writes_one = info.written[0] >= 0 && arguments.size() > 2 && arguments[2].isTensor() && arguments[2].toTensor().numel() == 1;
  return has_mask && !writes_one;
}

// Copies what a CPU kernel has returned to where the op's results were allocated.
void store(const c10::IValue& result, const c10::IValue& target) {
  std::vector<Tensor> results, targets;
  map_tensors(result, [&](const Tensor& tensor) { results.push_back(tensor); return tensor; });
  map_tensors(target, [&](const Tensor& tensor) { targets.push_back(tensor); return tensor; });
  if (results.empty() || targets.empty()) return;  // a backward may compute more than its output mask asks for
  TORCH_INTERNAL_ASSERT(results.size() == targets.size());
  for (size_t index = 0; index < results.size(); ++index) {
    // A norm in evaluation mode returns statistics that nothing reads: of no elements on the CPU, unset ones on CUDA.
    if (results[index].numel() == 0) continue;
    TORCH_INTERNAL_ASSERT(
        results[index].sizes() == targets[index].sizes(), "the CPU kernel returned ", results[index].sizes(), ", expected ",
        targets[index].sizes());
    targets[index].copy_(results[index]);
  }
}

Tensor to_device(const Tensor& value) {
  Tensor result = empty_on_device(value.sizes(), value.strides(), value.scalar_type());
  issue(current_stream(), Task{"read back", [target = alias_of(result), value](const Launch&) {
    BelowModes guard;
    target.copy_(value);
  }});
  return result;
}

// Kernels of CUDA that take types which those of the CPU do not: a softmax in float32 of float16 values, counts of
// integers, and the statistics of a norm in float32 where weight and input have 16 bits.
void widen_input(const c10::OperatorHandle& op, Stack& arguments) {
  const auto& name = op.operator_name().name;
  if (name == "aten::histc" && !arguments[0].toTensor().is_floating_point()) {
    arguments[0] = c10::IValue(arguments[0].toTensor().to(at::kFloat));
  }
  if ((name == "aten::_softmax" || name == "aten::_log_softmax") && arguments.size() >= 3 && arguments[2].toBool()) {
    arguments[0] = c10::IValue(arguments[0].toTensor().to(at::kFloat));
    arguments[2] = c10::IValue(false);
  }
  if (name == "aten::native_layer_norm_backward" && arguments[5].isTensor() && arguments[5].toTensor().defined()) {
    for (int statistic : {3, 4}) {
      arguments[statistic] = c10::IValue(arguments[statistic].toTensor().to(arguments[5].toTensor().scalar_type()));
    }
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  BelowModes guard;
  const OpInfo& info = info_of(op);
  size_t num_arguments = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<ptrdiff_t>(num_arguments), stack->end());
  torch::jit::drop(*stack, num_arguments);
  if (info.is_view) {
    make_view(op, stack, std::move(arguments));
    return;
  }
  check_devices(op, info, arguments);
  widen_input(op, arguments);

  int stream = current_stream();
  bool reads_back = info.reads_back || counts_selected(info, arguments);
  if (reads_back) synchronize_stream(stream);

  // `out=` tensors without a shape get one.
  bool has_empty_output = false;
  for (size_t index = 0; index < num_arguments; ++index) {
    if (!info.is_written[index]) continue;
    map_tensors(arguments[index], [&](const Tensor& tensor) {
      has_empty_output |= tensor.numel() == 0;
      return tensor;
    });
  }
  bool has_new = std::find(info.written.begin(), info.written.end(), -1) != info.written.end();
  Stack results(info.written.size());
  if (!reads_back && (has_new || has_empty_output)) {
    Stack inferred = infer_results(op, arguments);
    for (size_t index = 0; index < inferred.size(); ++index) {
      int written = info.written[index];
      if (written < 0) {
        results[index] = map_tensors(inferred[index], [](const Tensor& tensor) {
          return empty_on_device(tensor.sizes(), tensor.strides(), tensor.scalar_type());
        });
      } else if (has_empty_output && inferred[index].isTensor()) {
        const Tensor& output = arguments[written].toTensor();
        if (output.numel() == 0) at::native::resize_output(output, inferred[index].toTensor().sizes());
      }
    }
  }

  Memory memory;
  Tensor workspace;
  if (is_product(op)) {
    Tensor tensor = workspace_of(stream);
    memory.add(tensor);
    workspace = alias_of(tensor);
  }
  auto cpu_argument = [&](const Tensor& tensor) {
    memory.add(tensor);
    return for_cpu(tensor);
  };
  Call call{op, map_stack(arguments, cpu_argument, c10::DeviceType::CPU), std::nullopt, -1};
  std::optional<at::Generator> generator;
  for (size_t index = 0; index < num_arguments; ++index) {
    if (op.schema().arguments()[index].type()->str() != "Generator?") continue;
    call.generator_argument = static_cast<int>(index);
    if (arguments[index].isGenerator()) generator = arguments[index].toGenerator();
  }
  if (info.is_random || call.generator_argument >= 0) call.random = draw(generator, stream);

  if (reads_back) {
    Stack values = call.run(Launch{});
    for (size_t index = 0; index < values.size(); ++index) {
      int written = info.written[index];
      stack->push_back(written < 0 ? map_tensors(values[index], to_device) : std::move(arguments[written]));
    }
    return;
  }
  Stack targets;
  for (const auto& value : results) {
    targets.push_back(map_tensors(value, [&](const Tensor& tensor) {
      memory.add(tensor);
      return alias_of(tensor);
    }));
  }
  std::string name = c10::toString(op.operator_name());
  issue(stream, Task{name, [call = std::move(call), targets = std::move(targets), memory = std::move(memory), workspace, &info](const Launch& launch) {
    memory.check();
    Stack values = call.run(launch);
    BelowModes guard;
    at::NoGradGuard no_grad;
    if (workspace.defined()) workspace.fill_(std::numeric_limits<float>::quiet_NaN());
    for (size_t index = 0; index < values.size(); ++index) {
      if (info.written[index] < 0) store(values[index], targets[index]);
    }
  }});
  for (size_t index = 0; index < results.size(); ++index) {
    int written = info.written[index];
    stack->push_back(written < 0 ? std::move(results[index]) : std::move(arguments[written]));
  }
}

}  // namespace

void clear_workspaces() {
  Lock lock(state_mutex());
  workspaces().clear();
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("resize_", &resize_);
  library.impl("record_stream", &record_stream);
  // One op each on CUDA, and several in PyTorch's composite form, which chooses among kernels that are not there.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace simulated_cuda
