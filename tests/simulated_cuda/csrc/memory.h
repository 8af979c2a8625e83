// Device memory and pinned host memory.
//
// Device memory is the host's, handed out by a caching allocator as PyTorch's: what is freed is reused by the same stream
// and pool, last in first out, at once, and other streams do not wait for it. Blocks are not split. A freed block is
// filled with NaN (all bits set) in the order of its stream, so that a use after free shows in each run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <c10/core/Allocator.h>

namespace simulated_cuda {

using PoolId = std::pair<unsigned long long, unsigned long long>;
constexpr PoolId kNoPool{0, 0};

void* allocate(size_t num_bytes, int stream);  // raises torch.OutOfMemoryError
void release(void* address);
// Keeps the block from reuse until the work of `stream` so far is done.
void record_use(void* address, int stream);
bool is_mapped(const void* address, size_t num_bytes);

PoolId new_pool();
void begin_allocate_to_pool(const PoolId& pool);
void end_allocate_to_pool(const PoolId& pool);
void release_pool(const PoolId& pool);

void clear_workspaces();  // of cuBLAS, for all threads and streams
void empty_cache();
void set_total_bytes(size_t num_bytes);
std::pair<size_t, size_t> free_and_total_bytes();
void reset_peaks();

// As JSON: {"allocated": [current, peak, allocated, freed], ..., "segments": [...]}.
std::string memory_report();

// Memory of the host, by address: cudaHostRegister, and PyTorch's allocator of pinned memory.
int register_host(uintptr_t address, size_t num_bytes);
int unregister_host(uintptr_t address);
uint64_t pinned_id(const void* address);  // 0 if it is not pinned
bool is_still_pinned(uint64_t id);
void record_host_use(uint64_t id, int stream);  // before PyTorch's allocator may reuse it
void empty_host_cache();
size_t num_pinned_bytes();

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

}  // namespace simulated_cuda
