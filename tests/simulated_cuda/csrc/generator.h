// The random generator: a seed and an offset, as Philox has them. Each random op draws from a CPU generator seeded with both.
// In a capture, offsets count from 0, and each replay adds where the generator then stands.
#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>

#include "streams.h"

namespace simulated_cuda {

// One op's share of a generator.
struct Draw {
  bool is_captured = false;
  uint64_t seed = 0;
  uint64_t offset = 0;

  uint64_t cpu_seed(const Launch& launch) const;
};

Draw draw(const std::optional<at::Generator>& generator, int stream);

const at::Generator& default_generator();
at::Generator new_generator();
// The next new_generator() returns the default one: how Python gets an object for it.
void expose_default_generator();

void begin_captured_offsets();
uint64_t end_captured_offsets();  // how far a replay moves the generator
Launch next_launch(uint64_t offset_increment);

}  // namespace simulated_cuda
