#include "streams.h"

#include <array>
#include <bitset>
#include <chrono>
#include <deque>
#include <exception>
#include <random>
#include <utility>

#include <c10/util/Exception.h>

#include "capture.h"
#include "errors.h"

namespace simulated_cuda {
namespace {

struct Entry {
  Task task;
  int waits_for_stream = -1;  // then it is a wait, and not a task
  uint64_t waits_for_position = 0;
};

struct Queue {
  std::deque<Entry> entries;
  uint64_t num_issued = 0;
  uint64_t num_done = 0;
};

struct Device {
  std::array<Queue, kNumStreams> queues;
  Schedule schedule = Schedule::lazy;
  std::mt19937_64 random;
  std::bitset<kNumStreams> is_stalled;  // by the random schedule, for a while
  int num_handed_out[2] = {0, 0};
  Status error = Status::success;
  std::string error_detail;
};

Device& device() {
  static auto* device = new Device;
  return *device;
}

thread_local int this_threads_stream = kDefaultStream;

bool is_blocked(const Queue& queue) {
  const Entry& front = queue.entries.front();
  return front.waits_for_stream >= 0 && !has_reached(front.waits_for_stream, front.waits_for_position);
}

void run_front(Queue& queue) {
  Entry entry = std::move(queue.entries.front());
  queue.entries.pop_front();
  if (entry.waits_for_stream < 0) {
    Device& own = device();
    auto note = [&](Status status, const char* what) {
      if (own.error == Status::success) {
        own.error = status;
        own.error_detail = "in " + entry.task.name + ": " + what;
      }
    };
    try {
      entry.task.run(Launch{});
    } catch (const c10::AcceleratorError& error) {
      note(static_cast<Status>(error.get_error_code()), error.what_without_backtrace());
    } catch (const c10::Error& error) {
      note(Status::device_assert, error.what_without_backtrace());
    } catch (const std::exception& error) {
      note(Status::device_assert, error.what());
    }
  }
  ++queue.num_done;
}

// Runs a stream up to a position, and of other streams what that waits for. A stack of its own: under the lazy schedule
// chains of waits are thousands long.
void run_until(int stream, uint64_t position) {
  auto& queues = device().queues;
  std::vector<std::pair<int, uint64_t>> goals{{stream, position}};
  while (!goals.empty()) {
    auto [number, goal] = goals.back();
    Queue& queue = queues[number];
    if (queue.num_done >= goal) {
      goals.pop_back();
    } else if (is_blocked(queue)) {
      const Entry& front = queue.entries.front();
      goals.emplace_back(front.waits_for_stream, front.waits_for_position);
    } else {
      run_front(queue);
    }
  }
}

void stall_some() {
  for (int number = 0; number < kNumStreams; ++number) device().is_stalled[number] = device().random() % 2;
}

// Runs a few tasks of streams that can go on. Now and then half of the streams stop until the next time: a race may need
// that one of them falls far behind.
void run_some() {
  Device& own = device();
  if (own.random() % 64 == 0) stall_some();
  for (uint64_t count = own.random() % 4; count > 0; --count) {
    std::vector<int> ready;
    for (int number = 0; number < kNumStreams; ++number) {
      const Queue& queue = own.queues[number];
      if (!queue.entries.empty() && !own.is_stalled[number] && !is_blocked(queue)) ready.push_back(number);
    }
    if (ready.empty()) return;
    run_front(own.queues[ready[own.random() % ready.size()]]);
  }
}

void push(int stream, Entry entry) {
  Device& own = device();
  Queue& queue = own.queues[stream];
  queue.entries.push_back(std::move(entry));
  ++queue.num_issued;
  if (own.schedule == Schedule::eager) run_until(stream, queue.num_issued);
  if (own.schedule == Schedule::random) run_some();
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Schedule current_schedule() {
  return device().schedule;
}

void set_schedule(Schedule schedule, uint64_t seed) {
  Lock lock(state_mutex());
  synchronize_device();
  device().schedule = schedule;
  device().random.seed(seed);
  stall_some();
}

uint64_t random_number() {
  return device().random();
}

int current_stream() {
  return this_threads_stream;
}

int exchange_stream(int stream) {
  return std::exchange(this_threads_stream, stream);
}

int next_pool_stream(bool is_high_priority) {
  Lock lock(state_mutex());
  int& count = device().num_handed_out[is_high_priority];
  return 1 + is_high_priority * kNumPoolStreams + count++ % kNumPoolStreams;
}

void issue(int stream, Task task) {
  Lock lock(state_mutex());
  if (auto capture = capture_of(stream)) {
    add_node(*capture, stream, std::move(task));
  } else {
    push(stream, Entry{std::move(task)});
  }
}

void issue_eagerly(int stream, Task task) {
  Lock lock(state_mutex());
  push(stream, Entry{std::move(task)});
}

uint64_t position_of(int stream) {
  Lock lock(state_mutex());
  return device().queues[stream].num_issued;
}

bool has_reached(int stream, uint64_t position) {
  return device().queues[stream].num_done >= position;
}

void record(Event& event, int stream) {
  Lock lock(state_mutex());
  event.is_recorded = true;
  event.stream = stream;
  event.capture = capture_of(stream);
  if (event.capture) {
    event.nodes = frontier_of(*event.capture, stream);
    return;
  }
  event.nodes.clear();
  if (event.has_time) {
    event.seconds = std::make_shared<double>(-1);
    push(stream, Entry{Task{"event", [seconds = event.seconds](const Launch&) { *seconds = now(); }}});
  }
  event.position = position_of(stream);
}

void wait(const Event& event, int stream) {
  Lock lock(state_mutex());
  if (!event.is_recorded) return;
  auto own = capture_of(stream);
  if (event.capture) {
    join_capture(event.capture, event.nodes, stream);
  } else if (own) {
    invalidate(*own);
    fail(Status::capture_isolation);
  } else if (event.stream != stream) {
    Entry entry;
    entry.waits_for_stream = event.stream;
    entry.waits_for_position = event.position;
    push(stream, std::move(entry));
  }
}

namespace {

void check_not_captured(const Event& event) {
  if (event.capture) {
    if (event.capture->is_active) invalidate(*event.capture);
    fail(Status::captured_event);
  }
  forbid_in_capture();
}

}  // namespace

bool query(const Event& event) {
  Lock lock(state_mutex());
  if (!event.is_recorded) return true;
  check_not_captured(event);
  bool is_done = has_reached(event.stream, event.position);
  // Whoever asks again and again gets there in the end.
  if (!is_done) run_until(event.stream, device().queues[event.stream].num_done + 1);
  return is_done;
}

void synchronize(const Event& event) {
  Lock lock(state_mutex());
  if (!event.is_recorded) return;
  check_not_captured(event);
  run_until(event.stream, event.position);
  raise_asynchronous_error();
}

double milliseconds_between(const Event& begin, const Event& end) {
  Lock lock(state_mutex());
  TORCH_CHECK_VALUE(begin.has_time && end.has_time, "Both events must be created with argument 'enable_timing=True'.");
  TORCH_CHECK_VALUE(begin.seconds && end.seconds, "Both events must be recorded before calculating elapsed time.");
  if (*begin.seconds < 0 || *end.seconds < 0) fail(Status::not_ready);
  return (*end.seconds - *begin.seconds) * 1e3;
}

bool query_stream(int stream) {
  Lock lock(state_mutex());
  forbid_in_capture(stream);
  Queue& queue = device().queues[stream];
  bool is_done = queue.entries.empty();
  if (!is_done) run_until(stream, queue.num_done + 1);
  return is_done;
}

void synchronize_stream(int stream) {
  Lock lock(state_mutex());
  forbid_in_capture(stream);
  run_until(stream, device().queues[stream].num_issued);
  raise_asynchronous_error();
}

void synchronize_device() {
  Lock lock(state_mutex());
  forbid_in_any_capture();
  for (int stream = 0; stream < kNumStreams; ++stream) run_until(stream, device().queues[stream].num_issued);
  raise_asynchronous_error();
}

void raise_asynchronous_error() {
  Device& own = device();
  if (own.error == Status::success) return;
  Status status = std::exchange(own.error, Status::success);
  fail(status, std::exchange(own.error_detail, ""));
}

}  // namespace simulated_cuda
