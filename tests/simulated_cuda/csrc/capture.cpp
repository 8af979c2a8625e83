#include "capture.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "errors.h"
#include "generator.h"

namespace simulated_cuda {
namespace {

std::vector<std::shared_ptr<Capture>>& active_captures() {
  static auto* captures = new std::vector<std::shared_ptr<Capture>>;
  return *captures;
}

std::vector<bool> ancestors_of(const Capture& capture, const std::vector<size_t>& nodes) {
  std::vector<bool> is_ancestor(capture.nodes.size(), false);
  std::vector<size_t> open = nodes;
  while (!open.empty()) {
    size_t node = open.back();
    open.pop_back();
    if (is_ancestor[node]) continue;
    is_ancestor[node] = true;
    open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
  }
  return is_ancestor;
}

bool is_joined(const Capture& capture) {
  auto is_ancestor = ancestors_of(capture, frontier_of(capture, capture.origin));
  for (size_t node = 0; node < capture.nodes.size(); ++node) {
    if (!is_ancestor[node] && !capture.nodes[node].task.is_poison) return false;
  }
  return true;
}

// The order of one replay: as recorded, by chance, or with the work of other streams as late as the graph allows.
std::vector<size_t> order_of(const std::vector<Node>& nodes) {
  std::vector<size_t> order;
  order.reserve(nodes.size());
  if (current_schedule() == Schedule::eager) {
    for (size_t node = 0; node < nodes.size(); ++node) order.push_back(node);
    return order;
  }
  bool is_random = current_schedule() == Schedule::random;
  int origin = nodes.empty() ? 0 : nodes.front().stream;
  std::vector<size_t> num_before(nodes.size());
  std::vector<std::vector<size_t>> next(nodes.size());
  std::vector<size_t> ready, late;  // the origin's nodes, or all; those of other streams
  auto add = [&](size_t node) { (is_random || nodes[node].stream == origin ? ready : late).push_back(node); };
  for (size_t node = 0; node < nodes.size(); ++node) {
    num_before[node] = nodes[node].after.size();
    for (size_t before : nodes[node].after) next[before].push_back(node);
    if (num_before[node] == 0) add(node);
  }
  while (!ready.empty() || !late.empty()) {
    auto& from = ready.empty() ? late : ready;
    size_t index = is_random ? random_number() % from.size() : 0;
    size_t node = from[index];
    from.erase(from.begin() + static_cast<ptrdiff_t>(index));
    order.push_back(node);
    for (size_t follower : next[node]) {
      if (--num_before[follower] == 0) add(follower);
    }
  }
  return order;
}

}  // namespace

std::shared_ptr<Capture> capture_of(int stream) {
  for (const auto& capture : active_captures()) {
    if (capture->frontiers.count(stream)) return capture;
  }
  return nullptr;
}

bool is_any_capture_active() {
  return !active_captures().empty();
}

std::shared_ptr<Capture> capture_with_pool(const PoolId& pool) {
  for (const auto& capture : active_captures()) {
    if (capture->pool == pool) return capture;
  }
  return nullptr;
}

void invalidate(Capture& capture) {
  capture.is_invalid = true;
}

void add_node(Capture& capture, int stream, Task task) {
  if (capture.is_invalid) fail(Status::capture_invalidated);
  auto& frontier = capture.frontiers.at(stream);
  capture.nodes.push_back(Node{std::move(task), frontier, stream});
  frontier = {capture.nodes.size() - 1};
}

std::vector<size_t> frontier_of(const Capture& capture, int stream) {
  auto entry = capture.frontiers.find(stream);
  return entry == capture.frontiers.end() ? std::vector<size_t>{} : entry->second;
}

void join_capture(const std::shared_ptr<Capture>& capture, const std::vector<size_t>& nodes, int stream) {
  auto own = capture_of(stream);
  if (!capture->is_active) {
    if (own) invalidate(*own);
    fail(Status::captured_event);
  }
  if (own && own != capture) {
    invalidate(*own);
    invalidate(*capture);
    fail(Status::capture_merge);
  }
  if (capture->is_invalid) fail(Status::capture_invalidated);
  if (stream == kDefaultStream) {
    invalidate(*capture);
    fail(Status::capture_implicit);
  }
  auto& frontier = capture->frontiers[stream];
  for (size_t node : nodes) {
    if (std::find(frontier.begin(), frontier.end(), node) == frontier.end()) frontier.push_back(node);
  }
}

void forbid_in_capture(int stream) {
  bool is_forbidden = false;
  for (const auto& capture : active_captures()) {
    bool concerns_thread = capture->mode == CaptureMode::global ||
        (capture->mode == CaptureMode::thread_local_ && capture->thread == std::this_thread::get_id());
    if (concerns_thread || capture->frontiers.count(stream)) {
      is_forbidden = true;
      invalidate(*capture);
    }
  }
  if (is_forbidden) fail(Status::capture_unsupported);
}

void forbid_in_any_capture() {
  if (!is_any_capture_active()) return;
  for (const auto& capture : active_captures()) invalidate(*capture);
  fail(Status::capture_unsupported);
}

void abort_captures() {
  Lock lock(state_mutex());
  for (const auto& capture : active_captures()) {
    capture->is_active = false;
    end_allocate_to_pool(capture->pool);
  }
  if (is_any_capture_active()) end_captured_offsets();
  active_captures().clear();
}

Graph::~Graph() {
  reset();
}

void Graph::begin(const PoolId& pool, CaptureMode mode) {
  Lock lock(state_mutex());
  TORCH_CHECK(!nodes_, "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance.");
  int stream = current_stream();
  TORCH_CHECK(stream != kDefaultStream, "CUDA graphs must be captured on a non-default stream.");
  if (capture_of(stream)) fail(Status::illegal_state);
  begin_allocate_to_pool(pool);
  pool_ = pool;
  capture_ = std::make_shared<Capture>();
  capture_->mode = mode;
  capture_->thread = std::this_thread::get_id();
  capture_->origin = stream;
  capture_->pool = pool;
  capture_->frontiers[stream] = {};
  active_captures().push_back(capture_);
  begin_captured_offsets();
}

void Graph::end() {
  Lock lock(state_mutex());
  if (!capture_ || !capture_->is_active) fail(Status::illegal_state);
  TORCH_CHECK(current_stream() == capture_->origin, "Capture must end on the same stream it began on.");
  if (capture_->mode == CaptureMode::thread_local_ && capture_->thread != std::this_thread::get_id()) {
    invalidate(*capture_);
    fail(Status::capture_wrong_thread);
  }
  auto capture = std::exchange(capture_, nullptr);
  capture->is_active = false;
  auto& active = active_captures();
  active.erase(std::remove(active.begin(), active.end(), capture), active.end());
  end_allocate_to_pool(capture->pool);
  offset_increment_ = end_captured_offsets();
  if (capture->is_invalid) fail(Status::capture_invalidated);
  if (!is_joined(*capture)) fail(Status::capture_unjoined);
  nodes_ = std::make_shared<const std::vector<Node>>(std::move(capture->nodes));
}

void Graph::replay() {
  Lock lock(state_mutex());
  TORCH_CHECK(nodes_, "Called CUDAGraph::replay without a preceding successful capture.");
  int stream = current_stream();
  if (auto capture = capture_of(stream)) {
    invalidate(*capture);
    fail(Status::capture_unsupported, "a replay in a capture is not simulated");
  }
  Launch launch = next_launch(offset_increment_);
  issue(stream, Task{"a replay", [nodes = nodes_, launch](const Launch&) {
    for (size_t node : order_of(*nodes)) {
      const Task& task = (*nodes)[node].task;
      try {
        task.run(launch);
      } catch (c10::Error& error) {
        error.add_context("captured: " + task.name);
        throw;
      }
    }
  }});
}

void Graph::reset() {
  Lock lock(state_mutex());
  clear_workspaces();  // as PyTorch from 2.12 on (pytorch#193402)
  if (!nodes_) return;  // PyTorch does not give back the pool of a capture that failed either
  nodes_.reset();
  release_pool(pool_);
}

PoolId Graph::pool() const {
  TORCH_CHECK(nodes_, "Called CUDAGraph::pool() without a preceding successful capture.");
  return pool_;
}

}  // namespace simulated_cuda
