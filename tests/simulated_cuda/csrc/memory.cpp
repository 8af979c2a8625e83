#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <tuple>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include "capture.h"
#include "errors.h"
#include "streams.h"

namespace simulated_cuda {
namespace {

constexpr size_t kAlignment = 512;  // bytes, as PyTorch rounds sizes
constexpr int kPoison = 0xFF;       // NaN in every floating-point type, -1 in signed integers

using Stat = c10::CachingAllocator::Stat;

struct Block {
  char* address;
  size_t num_bytes;
  size_t num_requested = 0;
  int stream;
  PoolId pool;
  bool is_allocated = true;
  std::vector<std::pair<int, uint64_t>> uses;  // positions of other streams
};

struct Memory {
  std::map<const char*, std::unique_ptr<Block>> blocks;  // by address
  std::map<std::tuple<PoolId, int, size_t>, std::vector<Block*>> free;
  std::list<Block*> delayed;                             // freed, but other streams have not passed their uses
  std::map<PoolId, int> pool_uses;
  std::set<PoolId> recording;
  unsigned long long num_pools = 0;
  size_t total_bytes = size_t{16} << 30;
  Stat allocated, reserved, requested, count;
  int64_t num_retries = 0, num_out_of_memory = 0;
};

Memory& memory() {
  static auto* memory = new Memory;  // never destroyed: storages are freed at exit
  return *memory;
}

Task poison(char* address, size_t num_bytes) {
  return {"free", [=](const Launch&) {
    if (is_mapped(address, num_bytes)) std::memset(address, kPoison, num_bytes);
  }, /*is_poison=*/true};
}

void make_available(Block& block) {
  Memory& own = memory();
  if (block.pool == kNoPool) {
    issue_eagerly(block.stream, poison(block.address, block.num_bytes));
  } else if (auto capture = capture_with_pool(block.pool)) {
    if (capture_of(block.stream) == capture && !capture->is_invalid) {
      issue(block.stream, poison(block.address, block.num_bytes));
    }
  }  // else a graph has its address, and a replay may be under way
  own.free[{block.pool, block.stream, block.num_bytes}].push_back(&block);
}

void release_delayed() {
  Memory& own = memory();
  if (is_any_capture_active()) return;
  for (auto it = own.delayed.begin(); it != own.delayed.end();) {
    auto& uses = (*it)->uses;
    if (std::all_of(uses.begin(), uses.end(), [](auto& use) { return has_reached(use.first, use.second); })) {
      uses.clear();
      make_available(**it);
      it = own.delayed.erase(it);
    } else {
      ++it;
    }
  }
}

bool is_pool_in_use(const PoolId& pool) {
  if (pool == kNoPool) return false;
  auto entry = memory().pool_uses.find(pool);
  return entry != memory().pool_uses.end() && entry->second > 0;
}

void return_cached_blocks() {
  Memory& own = memory();
  synchronize_device();
  release_delayed();
  synchronize_device();
  for (auto it = own.free.begin(); it != own.free.end();) {
    if (is_pool_in_use(std::get<0>(it->first))) {
      ++it;
      continue;
    }
    for (Block* block : it->second) {
      own.reserved.decrease(block->num_bytes);
      std::free(block->address);
      own.blocks.erase(block->address);
    }
    it = own.free.erase(it);
  }
  for (auto it = own.pool_uses.begin(); it != own.pool_uses.end();) {
    bool has_blocks = std::any_of(own.blocks.begin(), own.blocks.end(), [&](auto& entry) { return entry.second->pool == it->first; });
    it = it->second == 0 && !has_blocks ? own.pool_uses.erase(it) : std::next(it);
  }
}

Block* new_block(size_t num_bytes, size_t num_requested, int stream, const PoolId& pool) {
  Memory& own = memory();
  auto fits = [&] { return static_cast<size_t>(own.reserved.current) + num_bytes <= own.total_bytes; };
  if (!fits() && !is_any_capture_active()) {
    ++own.num_retries;
    return_cached_blocks();
  }
  void* address = fits() ? std::aligned_alloc(kAlignment, num_bytes) : nullptr;
  if (address == nullptr) {
    ++own.num_out_of_memory;
    using c10::CachingAllocator::format_size;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(num_requested),
        ". GPU 0 has a total capacity of ", format_size(own.total_bytes), " of which ",
        format_size(own.total_bytes - std::min<size_t>(own.total_bytes, own.reserved.current)), " is free.");
  }
  std::memset(address, kPoison, num_bytes);
  own.reserved.increase(num_bytes);
  auto block = std::make_unique<Block>(Block{static_cast<char*>(address), num_bytes, 0, stream, pool, true, {}});
  return (own.blocks[block->address] = std::move(block)).get();
}

}  // namespace

void* allocate(size_t num_requested, int stream) {
  Lock lock(state_mutex());
  if (num_requested == 0) return nullptr;
  Memory& own = memory();
  release_delayed();
  auto capture = capture_of(stream);
  PoolId pool = capture ? capture->pool : kNoPool;
  size_t num_bytes = (num_requested + kAlignment - 1) / kAlignment * kAlignment;
  auto& free = own.free[{pool, stream, num_bytes}];
  Block* block = nullptr;
  if (free.empty()) {
    block = new_block(num_bytes, num_requested, stream, pool);
  } else {
    block = free.back();
    free.pop_back();
    block->is_allocated = true;
  }
  if (capture && !capture->is_invalid) issue(stream, poison(block->address, num_bytes));  // in each replay
  block->num_requested = num_requested;
  own.allocated.increase(num_bytes);
  own.requested.increase(num_requested);
  own.count.increase(1);
  return block->address;
}

void release(void* address) {
  Lock lock(state_mutex());
  Memory& own = memory();
  auto entry = own.blocks.find(static_cast<char*>(address));
  TORCH_INTERNAL_ASSERT(entry != own.blocks.end() && entry->second->is_allocated);
  Block& block = *entry->second;
  block.is_allocated = false;
  own.allocated.decrease(block.num_bytes);
  own.requested.decrease(block.num_requested);
  own.count.decrease(1);
  if (block.uses.empty()) {
    make_available(block);
  } else {
    for (auto& [stream, position] : block.uses) position = position_of(stream);  // CUDA records its events now, too
    own.delayed.push_back(&block);
  }
}

void record_use(void* address, int stream) {
  Lock lock(state_mutex());
  auto entry = memory().blocks.find(static_cast<char*>(address));
  if (entry != memory().blocks.end() && entry->second->stream != stream) {
    entry->second->uses.emplace_back(stream, position_of(stream));
  }
}

bool is_mapped(const void* address, size_t num_bytes) {
  Lock lock(state_mutex());
  auto& blocks = memory().blocks;
  auto next = blocks.upper_bound(static_cast<const char*>(address));
  if (next == blocks.begin()) return false;
  const Block& block = *std::prev(next)->second;
  return static_cast<const char*>(address) + num_bytes <= block.address + block.num_bytes;
}

PoolId new_pool() {
  Lock lock(state_mutex());
  return {0, ++memory().num_pools};
}

void begin_allocate_to_pool(const PoolId& pool) {
  Lock lock(state_mutex());
  Memory& own = memory();
  TORCH_CHECK(!own.recording.count(pool), "beginAllocateToPool: already recording to mempool_id");
  auto entry = own.pool_uses.find(pool);
  TORCH_CHECK(entry == own.pool_uses.end() || entry->second > 0, "use_count > 0 INTERNAL ASSERT FAILED");
  ++own.pool_uses[pool];
  own.recording.insert(pool);
}

void end_allocate_to_pool(const PoolId& pool) {
  Lock lock(state_mutex());
  TORCH_CHECK(memory().recording.erase(pool), "endAllocatePool: not currently recording to mempool_id");
}

void release_pool(const PoolId& pool) {
  Lock lock(state_mutex());
  auto entry = memory().pool_uses.find(pool);
  TORCH_CHECK(entry != memory().pool_uses.end() && entry->second > 0, "releasePool: the pool is not in use");
  --entry->second;
}

void empty_cache() {
  Lock lock(state_mutex());
  TORCH_CHECK(memory().recording.empty(), "captures_underway.empty() INTERNAL ASSERT FAILED");
  return_cached_blocks();
}

void set_total_bytes(size_t num_bytes) {
  Lock lock(state_mutex());
  memory().total_bytes = num_bytes;
}

std::pair<size_t, size_t> free_and_total_bytes() {
  Lock lock(state_mutex());
  size_t total = memory().total_bytes;
  return {total - std::min<size_t>(total, memory().reserved.current), total};
}

void reset_peaks() {
  Lock lock(state_mutex());
  Memory& own = memory();
  for (Stat* stat : {&own.allocated, &own.reserved, &own.requested, &own.count}) stat->reset_peak();
}

std::string memory_report() {
  Lock lock(state_mutex());
  const Memory& own = memory();
  std::ostringstream out;
  auto put = [&](const char* name, const Stat& stat) {
    out << '"' << name << "\": [" << stat.current << ", " << stat.peak << ", " << stat.allocated << ", " << stat.freed << "], ";
  };
  out << '{';
  put("allocated_bytes", own.allocated);
  put("reserved_bytes", own.reserved);
  put("requested_bytes", own.requested);
  put("allocation", own.count);
  out << "\"num_alloc_retries\": " << own.num_retries << ", \"num_ooms\": " << own.num_out_of_memory << ", \"segments\": [";
  const char* separator = "";
  for (const auto& [address, block] : own.blocks) {
    out << separator << "{\"address\": " << reinterpret_cast<uintptr_t>(address) << ", \"total_size\": " << block->num_bytes
        << ", \"allocated_size\": " << (block->is_allocated ? block->num_bytes : 0) << ", \"stream\": " << block->stream
        << ", \"segment_pool_id\": [" << block->pool.first << ", " << block->pool.second << "], \"device\": 0}";
    separator = ", ";
  }
  out << "]}";
  return out.str();
}

// --- pinned memory of the host

namespace {

struct HostRange {
  size_t num_bytes;
  uint64_t id;
  bool is_registered;  // else it is PyTorch's
  std::vector<std::pair<int, uint64_t>> uses;
  bool is_captured = false;  // then it is not reused
};

struct HostMemory {
  std::map<uintptr_t, HostRange> ranges;
  std::map<uint64_t, uintptr_t> addresses;  // by id
  std::map<size_t, std::vector<uintptr_t>> free;
  std::vector<uintptr_t> delayed;
  uint64_t num_ids = 0;
};

HostMemory& host() {
  static auto* host = new HostMemory;
  return *host;
}

std::map<uintptr_t, HostRange>::iterator host_range_at(uintptr_t address) {
  auto next = host().ranges.upper_bound(address);
  if (next == host().ranges.begin()) return host().ranges.end();
  auto entry = std::prev(next);
  return address < entry->first + entry->second.num_bytes ? entry : host().ranges.end();
}

void add_host_range(uintptr_t address, size_t num_bytes, bool is_registered) {
  uint64_t id = ++host().num_ids;
  host().ranges[address] = HostRange{num_bytes, id, is_registered, {}, false};
  host().addresses[id] = address;
}

void drop_host_range(uintptr_t address) {
  host().addresses.erase(host().ranges.at(address).id);
  host().ranges.erase(address);
}

void reuse_host_blocks() {
  std::vector<uintptr_t> still;
  for (uintptr_t address : host().delayed) {
    HostRange& range = host().ranges.at(address);
    bool is_done = !range.is_captured && std::all_of(range.uses.begin(), range.uses.end(), [](auto& use) { return has_reached(use.first, use.second); });
    if (is_done) {
      range.uses.clear();
      std::memset(reinterpret_cast<void*>(address), kPoison, range.num_bytes);
      host().free[range.num_bytes].push_back(address);
    } else {
      still.push_back(address);
    }
  }
  host().delayed = std::move(still);
}

void release_host(void* address) {
  Lock lock(state_mutex());
  host().delayed.push_back(reinterpret_cast<uintptr_t>(address));
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_requested) override {
    Lock lock(state_mutex());
    if (num_requested == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    size_t num_bytes = 64;
    while (num_bytes < num_requested) num_bytes *= 2;  // as PyTorch's
    reuse_host_blocks();
    auto& free = host().free[num_bytes];
    void* address = nullptr;
    if (free.empty()) {
      address = std::aligned_alloc(64, num_bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, address, "CUDA error: out of memory (pinned)");
      add_host_range(reinterpret_cast<uintptr_t>(address), num_bytes, false);
    } else {
      address = reinterpret_cast<void*>(free.back());
      free.pop_back();
    }
    return {address, address, &release_host, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_host; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
};

}  // namespace

int register_host(uintptr_t address, size_t num_bytes) {
  Lock lock(state_mutex());
  forbid_in_capture();
  auto next = host().ranges.lower_bound(address);
  if (host_range_at(address) != host().ranges.end() || (next != host().ranges.end() && next->first < address + num_bytes)) {
    return static_cast<int>(Status::host_already_registered);
  }
  add_host_range(address, num_bytes, true);
  return 0;
}

int unregister_host(uintptr_t address) {
  Lock lock(state_mutex());
  forbid_in_capture();
  auto entry = host().ranges.find(address);
  if (entry == host().ranges.end() || !entry->second.is_registered) return static_cast<int>(Status::host_not_registered);
  drop_host_range(address);
  return 0;
}

uint64_t pinned_id(const void* address) {
  Lock lock(state_mutex());
  auto entry = host_range_at(reinterpret_cast<uintptr_t>(address));
  return entry == host().ranges.end() ? 0 : entry->second.id;
}

bool is_still_pinned(uint64_t id) {
  Lock lock(state_mutex());
  return host().addresses.count(id) > 0;
}

void record_host_use(uint64_t id, int stream) {
  Lock lock(state_mutex());
  HostRange& range = host().ranges.at(host().addresses.at(id));
  if (range.is_registered) return;
  if (capture_of(stream)) {
    range.is_captured = true;
  } else {
    range.uses.emplace_back(stream, position_of(stream));
  }
}

void empty_host_cache() {
  Lock lock(state_mutex());
  reuse_host_blocks();
  for (auto& [num_bytes, addresses] : host().free) {
    for (uintptr_t address : addresses) {
      drop_host_range(address);
      std::free(reinterpret_cast<void*>(address));
    }
    addresses.clear();
  }
}

size_t num_pinned_bytes() {
  Lock lock(state_mutex());
  size_t sum = 0;
  for (const auto& [address, range] : host().ranges) {
    if (!range.is_registered) sum += range.num_bytes;
  }
  return sum;
}

// --- as PyTorch sees them

namespace {

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* address = simulated_cuda::allocate(num_bytes, current_stream());
    if (address == nullptr) return {nullptr, c10::Device(c10::DeviceType::CUDA, 0)};
    return {address, address, &release, c10::Device(c10::DeviceType::CUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t count) const override {
    issue(current_stream(), Task{"copy_data", [=](const Launch&) { std::memmove(target, source, count); }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(data.get(), static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    Lock lock(state_mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = memory().allocated;
    stats.reserved_bytes[0] = memory().reserved;
    stats.requested_bytes[0] = memory().requested;
    stats.allocation[0] = memory().count;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { reset_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override { return free_and_total_bytes(); }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* allocator = new DeviceAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return allocator;
}

static c10::AllocatorRegisterer<c10::DeviceType::CUDA> registerer(device_allocator());

}  // namespace simulated_cuda
