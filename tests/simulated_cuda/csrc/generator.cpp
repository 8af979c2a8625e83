#include "generator.h"

#include <cstring>
#include <memory>

#include <ATen/Functions.h>
#include <ATen/Utils.h>
#include <c10/core/GeneratorImpl.h>

#include "capture.h"
#include "errors.h"

namespace simulated_cuda {
namespace {

constexpr uint64_t kOffsetsPerOp = 4;  // Philox makes four numbers at a time

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
  bool is_capturing = false;
  uint64_t captured_offset = 0;
};

class Impl final : public c10::GeneratorImpl {
 public:
  explicit Impl(std::shared_ptr<State> state = std::make_shared<State>())
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        state(std::move(state)) {}

  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }

  void set_current_seed(uint64_t seed) override {
    Lock lock(state_mutex());
    if (state->is_capturing && capture_of(current_stream())) {
      TORCH_CHECK(
          state->seed == seed,
          "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same as the "
          "original seed.");
      return;
    }
    state->seed = seed;
    state->offset = 0;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(!capture_of(current_stream()), "Cannot call CUDAGeneratorImpl::set_offset during CUDA graph capture.");
    set_present_offset(offset);
  }
  uint64_t get_offset() const override { return present_offset(); }
  uint64_t current_seed() const override { return state->seed; }
  uint64_t seed() override {
    uint64_t seed = c10::detail::getNonDeterministicRandom(/*is_cuda=*/true);
    set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& new_state) override {
    Lock lock(state_mutex());
    TORCH_CHECK(new_state.numel() == 16 && new_state.is_contiguous(), "RNG state is wrong size");
    uint64_t words[2];
    std::memcpy(words, new_state.data(), sizeof words);
    set_current_seed(words[0]);
    set_present_offset(words[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Lock lock(state_mutex());
    uint64_t words[2] = {state->seed, present_offset()};
    auto tensor = at::detail::empty_cpu({16}, at::kByte, {}, {}, {}, {});
    std::memcpy(tensor.mutable_data_ptr(), words, sizeof words);
    return tensor.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    auto* same = dynamic_cast<Impl*>(other.get());
    TORCH_CHECK(same, "expected a CUDA generator");
    state = same->state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return c10::make_intrusive<Impl>(state); }

  std::shared_ptr<State> state;

 private:
  Impl* clone_impl() const override { return new Impl(std::make_shared<State>(*state)); }
  bool counts_captured() const { return state->is_capturing && capture_of(current_stream()); }
  uint64_t present_offset() const {
    Lock lock(state_mutex());
    return counts_captured() ? state->captured_offset : state->offset;
  }
  void set_present_offset(uint64_t offset) {
    Lock lock(state_mutex());
    TORCH_CHECK(offset % kOffsetsPerOp == 0, "offset must be a multiple of 4");
    (counts_captured() ? state->captured_offset : state->offset) = offset;
  }
};

State& default_state() {
  return *static_cast<Impl*>(default_generator().unsafeGetGeneratorImpl())->state;
}

thread_local bool exposes_default = false;

uint64_t mix(uint64_t value) {  // the finalizer of splitmix64
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

}  // namespace

uint64_t Draw::cpu_seed(const Launch& launch) const {
  return mix(mix(is_captured ? launch.seed : seed) + offset + (is_captured ? launch.offset : 0));
}

Draw draw(const std::optional<at::Generator>& generator, int stream) {
  Lock lock(state_mutex());
  auto* impl = generator.has_value() && generator->defined()
      ? at::check_generator<Impl>(generator)
      : static_cast<Impl*>(default_generator().unsafeGetGeneratorImpl());
  State& state = *impl->state;
  bool is_captured = capture_of(stream) != nullptr;
  TORCH_CHECK(
      !is_captured || state.is_capturing, "Attempt to increase offset for a CUDA generator not in capture mode.");
  uint64_t& offset = is_captured ? state.captured_offset : state.offset;
  Draw result{is_captured, state.seed, offset};
  offset += kOffsetsPerOp;
  return result;
}

const at::Generator& default_generator() {
  static auto* generator = new at::Generator(at::make_generator<Impl>());
  return *generator;
}

at::Generator new_generator() {
  if (std::exchange(exposes_default, false)) return default_generator();
  return at::make_generator<Impl>();
}

void expose_default_generator() {
  exposes_default = true;
}

void begin_captured_offsets() {
  default_state().is_capturing = true;
  default_state().captured_offset = 0;
}

uint64_t end_captured_offsets() {
  default_state().is_capturing = false;
  return default_state().captured_offset;
}

Launch next_launch(uint64_t offset_increment) {
  Launch launch{default_state().seed, default_state().offset};
  default_state().offset += offset_increment;
  return launch;
}

}  // namespace simulated_cuda
