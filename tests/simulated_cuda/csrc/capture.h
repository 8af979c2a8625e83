// Captures record the tasks of streams as a graph. Streams join by events; what CUDA forbids makes a capture invalid.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace simulated_cuda {

enum class CaptureMode { global, thread_local_, relaxed };

struct Node {
  Task task;
  std::vector<size_t> after;
  int stream;
};

struct Capture {
  CaptureMode mode;
  std::thread::id thread;
  int origin;  // the stream that it began on
  PoolId pool;
  bool is_active = true;
  bool is_invalid = false;
  std::vector<Node> nodes;
  std::map<int, std::vector<size_t>> frontiers;  // of each stream that takes part: the nodes that its next one follows
};

std::shared_ptr<Capture> capture_of(int stream);
bool is_any_capture_active();
std::shared_ptr<Capture> capture_with_pool(const PoolId& pool);

// Raises in an invalid capture.
void add_node(Capture& capture, int stream, Task task);
std::vector<size_t> frontier_of(const Capture& capture, int stream);
void join_capture(const std::shared_ptr<Capture>& capture, const std::vector<size_t>& nodes, int stream);
void invalidate(Capture& capture);

// Raises, and makes the captures invalid, if a call that may not be made in a capture is made in one: of this thread,
// of any thread where the capture's mode is global, or of `stream`.
void forbid_in_capture(int stream = -1);
// The same for calls that concern the device as such, which no capture of any thread permits.
void forbid_in_any_capture();

// Ends all captures without a graph, for tests that were left in the middle of one.
void abort_captures();

// Backs torch.cuda.CUDAGraph.
class Graph {
 public:
  ~Graph();
  void begin(const PoolId& pool, CaptureMode mode);  // on the current stream
  void end();
  void replay();
  void reset();
  PoolId pool() const;

 private:
  std::shared_ptr<Capture> capture_;
  std::shared_ptr<const std::vector<Node>> nodes_;
  PoolId pool_{0, 0};
  uint64_t offset_increment_ = 0;
};

}  // namespace simulated_cuda
