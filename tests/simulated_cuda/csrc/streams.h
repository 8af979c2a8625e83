// Streams are queues of tasks; events are positions in them. A schedule decides when a task runs:
//
//   lazy     only when the host synchronizes, and then only what it waits for, along the edges of events
//   eager    at once
//   random   some tasks of any streams whenever one is issued, by a seeded generator
//
// All three are orders that CUDA permits. One thread at a time runs tasks, so a schedule and a seed give one order.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simulated_cuda {

struct Capture;

enum class Schedule { lazy, eager, random };

// The random generator's state at a replay; eager tasks ignore it.
struct Launch {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

struct Task {
  std::string name;
  std::function<void(const Launch&)> run;
  bool is_poison = false;  // fills freed memory: no work of the user's, so a capture need not join it
};

struct Event {
  explicit Event(bool has_time) : has_time(has_time) {}

  const bool has_time;
  bool is_recorded = false;
  int stream = 0;
  uint64_t position = 0;               // of an eager stream
  std::shared_ptr<Capture> capture;    // or the capture that it was recorded in,
  std::vector<size_t> nodes;           // after these nodes
  std::shared_ptr<double> seconds;     // set when the device gets there
};

constexpr int kDefaultStream = 0;
constexpr int kNumPoolStreams = 32;  // for each of two priorities, handed out in turn as PyTorch does
constexpr int kNumStreams = 1 + 2 * kNumPoolStreams;

Schedule current_schedule();
void set_schedule(Schedule schedule, uint64_t seed);  // synchronizes
uint64_t random_number();                             // of the random schedule

int current_stream();  // of this thread
int exchange_stream(int stream);
int next_pool_stream(bool is_high_priority);

// Issues a task on a stream: to the capture that the stream takes part in, or to its queue.
void issue(int stream, Task task);
// Issues a task to the queue of a stream, whether or not the stream is being captured.
void issue_eagerly(int stream, Task task);

uint64_t position_of(int stream);
bool has_reached(int stream, uint64_t position);

void record(Event& event, int stream);
void wait(const Event& event, int stream);
bool query(const Event& event);
void synchronize(const Event& event);
double milliseconds_between(const Event& begin, const Event& end);

bool query_stream(int stream);
void synchronize_stream(int stream);
void synchronize_device();

// What a task raised, such as an index out of range, is raised by the next call that waits for the device, once.
void raise_asynchronous_error();

}  // namespace simulated_cuda
