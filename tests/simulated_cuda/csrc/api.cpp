// The functions that Python calls by ctypes. Each returns 0, or sets the error that `last_error` describes.

#include <cstdint>
#include <string>

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include "capture.h"
#include "errors.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

using namespace simulated_cuda;

namespace {

enum Kind { none = 0, runtime_error = 1, accelerator_error = 2, out_of_memory_error = 3 };

thread_local std::string last_message;

template <typename Function>
int guarded(Function function) {
  try {
    function();
    return none;
  } catch (const c10::AcceleratorError& error) {
    last_message = error.what_without_backtrace();
    return accelerator_error;
  } catch (const c10::OutOfMemoryError& error) {
    last_message = error.what_without_backtrace();
    return out_of_memory_error;
  } catch (const c10::Error& error) {
    last_message = error.what_without_backtrace();
    return runtime_error;
  } catch (const std::exception& error) {
    last_message = error.what();
    return runtime_error;
  }
}

Graph& graph_at(void* graph) {
  return *static_cast<Graph*>(graph);
}

}  // namespace

extern "C" {

const char* last_error() { return last_message.c_str(); }

int use_schedule(int schedule, uint64_t seed) {
  return guarded([&] { set_schedule(static_cast<Schedule>(schedule), seed); });
}

int get_stream() { return current_stream(); }
void set_stream(int stream) { exchange_stream(stream); }
int is_capturing() {
  Lock lock(state_mutex());
  return capture_of(current_stream()) != nullptr;
}
int synchronize_all() { return guarded([] { synchronize_device(); }); }

int event_elapsed(void* begin, void* end, double* milliseconds) {
  return guarded([&] {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    *milliseconds = milliseconds_between(*static_cast<Event*>(begin), *static_cast<Event*>(end));
  });
}

void* graph_new() { return new Graph; }
void graph_delete(void* graph) { delete static_cast<Graph*>(graph); }
int graph_begin(void* graph, uint64_t first, uint64_t second, int mode) {
  return guarded([&] { graph_at(graph).begin({first, second}, static_cast<CaptureMode>(mode)); });
}
int graph_end(void* graph) { return guarded([&] { graph_at(graph).end(); }); }
int graph_replay(void* graph) { return guarded([&] { graph_at(graph).replay(); }); }
int graph_reset(void* graph) { return guarded([&] { graph_at(graph).reset(); }); }
int graph_pool(void* graph, uint64_t* pool) {
  return guarded([&] {
    PoolId id = graph_at(graph).pool();
    pool[0] = id.first;
    pool[1] = id.second;
  });
}
uint64_t pool_new() { return new_pool().second; }
int pool_begin_allocate(uint64_t first, uint64_t second) { return guarded([&] { begin_allocate_to_pool({first, second}); }); }
int pool_end_allocate(uint64_t first, uint64_t second) { return guarded([&] { end_allocate_to_pool({first, second}); }); }
int pool_release(uint64_t first, uint64_t second) { return guarded([&] { release_pool({first, second}); }); }
int captures_abort() {
  bool had_any = is_any_capture_active();
  abort_captures();
  return had_any;
}

int workspaces_clear() { return guarded([] { clear_workspaces(); }); }
int cache_empty() { return guarded([] { empty_cache(); }); }
int host_cache_empty() { return guarded([] { empty_host_cache(); }); }
const char* memory_report_json() {
  static thread_local std::string report;
  report = memory_report();
  return report.c_str();
}
void memory_reset_peaks() { reset_peaks(); }
void memory_set_total(uint64_t num_bytes) { set_total_bytes(num_bytes); }
void memory_info(uint64_t* free_and_total) {
  auto [free, total] = free_and_total_bytes();
  free_and_total[0] = free;
  free_and_total[1] = total;
}
uint64_t host_num_pinned_bytes() { return num_pinned_bytes(); }

// As CUDA's own functions, these return an error code.
int host_register(uint64_t address, uint64_t num_bytes) {
  int code = 0;
  int kind = guarded([&] { code = register_host(address, num_bytes); });
  return kind == none ? code : static_cast<int>(Status::capture_unsupported);
}
int host_unregister(uint64_t address) {
  int code = 0;
  int kind = guarded([&] { code = unregister_host(address); });
  return kind == none ? code : static_cast<int>(Status::capture_unsupported);
}
const char* error_string(int code) { return message_of(static_cast<Status>(code)); }

// Some of PyTorch's own checks ask whether the device was initialized.
int context_init() { return guarded([] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }); }
void generator_expose_default() { expose_default_generator(); }
}
