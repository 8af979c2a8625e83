#include "errors.h"

#include <c10/util/Exception.h>

namespace simulated_cuda {

const char* message_of(Status status) {
  switch (status) {
    case Status::success: return "no error";
    case Status::out_of_memory: return "out of memory";
    case Status::illegal_state: return "the operation cannot be performed in the present state";
    case Status::not_ready: return "device not ready";
    case Status::illegal_address: return "an illegal memory access was encountered";
    case Status::device_assert: return "device-side assert triggered";
    case Status::host_already_registered: return "part or all of the requested memory range is already mapped";
    case Status::host_not_registered: return "pointer does not correspond to a registered memory region";
    case Status::capture_unsupported: return "operation not permitted when stream is capturing";
    case Status::capture_invalidated: return "operation failed due to a previous error during capture";
    case Status::capture_merge: return "operation would result in a merge of separate capture sequences";
    case Status::capture_unjoined: return "capturing stream has unjoined work";
    case Status::capture_isolation: return "dependency created on uncaptured work in another stream";
    case Status::capture_implicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case Status::captured_event: return "operation not permitted on an event last recorded in a capturing stream";
    case Status::capture_wrong_thread:
      return "attempt to terminate a thread-local capture sequence from another thread";
  }
  return "unknown error";
}

void fail(Status status, const std::string& detail) {
  std::string message = std::string("CUDA error: ") + message_of(status);
  if (!detail.empty()) message += "\n" + detail;
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, static_cast<int32_t>(status), message);
}

std::recursive_mutex& state_mutex() {
  static auto* mutex = new std::recursive_mutex;  // never destroyed: storages are freed at exit
  return *mutex;
}

}  // namespace simulated_cuda
