// CUDA's error codes, as far as the simulated device can return them, and the lock that all of its parts share.
#pragma once

#include <mutex>
#include <string>

namespace simulated_cuda {

enum class Status : int {
  success = 0,
  out_of_memory = 2,
  illegal_state = 401,
  not_ready = 600,
  illegal_address = 700,
  device_assert = 710,
  host_already_registered = 712,
  host_not_registered = 713,
  capture_unsupported = 900,
  capture_invalidated = 901,
  capture_merge = 902,
  capture_unjoined = 904,
  capture_isolation = 905,
  capture_implicit = 906,
  captured_event = 907,
  capture_wrong_thread = 908,
};

// CUDA's own words for `status`.
const char* message_of(Status status);

// Raises torch.AcceleratorError with "CUDA error: " and CUDA's words, then `detail`.
[[noreturn]] void fail(Status status, const std::string& detail = "");

// One lock for all state. No Python runs under it: a thread that holds it never waits for the interpreter's lock.
std::recursive_mutex& state_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace simulated_cuda
