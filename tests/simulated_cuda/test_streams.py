"""A missing wait, a freed block and each kind of copy on the simulated device."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from simulated_cuda.library import use_schedule

pytestmark = pytest.mark.gpu

N = 64


@pytest.fixture(autouse=True)
def late() -> None:
    """What is not waited for has not run; `.tolist()` waits for the tensor's own stream alone."""
    use_schedule("lazy")


def test_the_device_is_a_cuda_device_to_pytorch_and_nothing_warns() -> None:
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    tensor = torch.ones(3, device="cuda")
    assert tensor.is_cuda
    assert str(tensor) == "tensor([1., 1., 1.], device='cuda:0')"
    assert torch.cuda.get_device_name() == "Simulated CUDA device"
    with warnings.catch_warnings(action="error"):
        model = torch.nn.Linear(4, 4).cuda()
        model(torch.ones(2, 4, device="cuda")).sum().backward()


# --- order


def test_a_wait_for_an_event_makes_the_value_visible(schedule: str, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        source = torch.full((N,), 3.0, device="cuda")
        event = side.record_event()
    torch.cuda.current_stream().wait_event(event)
    assert (source * 2).tolist() == [6.0] * N


def test_without_the_wait_it_is_nan_or_has_old_values(side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        source = torch.full((N,), 3.0, device="cuda")
    assert all(value != value for value in (source * 2).tolist())
    tensor = torch.zeros(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.fill_(1.0)
    assert tensor.tolist() == [0.0] * N
    torch.cuda.current_stream().wait_stream(side)
    assert tensor.tolist() == [1.0] * N


def test_some_random_schedule_shows_a_missing_wait(side: torch.cuda.Stream) -> None:
    right = 0
    for seed in range(20):
        use_schedule(f"random:{seed}")
        with torch.cuda.stream(side):
            source = torch.full((N,), 3.0, device="cuda")
        right += (source * 2).tolist() == [6.0] * N
    assert 0 < right < 20


def test_a_schedule_gives_one_order(side: torch.cuda.Stream) -> None:
    def one_run() -> float:
        use_schedule("random:3")
        tensor = torch.zeros((), device="cuda")
        for number in range(30):
            with torch.cuda.stream(side if number % 2 else torch.cuda.default_stream()):
                tensor.mul_(2).add_(number)
        torch.cuda.synchronize()
        return float(tensor)

    assert one_run() == one_run()


def test_an_event_is_a_position_and_a_wait_is_for_what_was_recorded_then(side: torch.cuda.Stream) -> None:
    tensor = torch.zeros(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.fill_(1.0)
        event = side.record_event()
        tensor.fill_(2.0)
    torch.cuda.current_stream().wait_event(event)
    event.record(side)  # too late for the wait
    assert tensor.tolist() == [1.0] * N


def test_queries_do_not_wait_and_end(side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        torch.ones(N, device="cuda").add_(1)
    event = side.record_event()
    assert not event.query()
    assert not side.query()
    while not event.query():
        pass
    assert torch.cuda.Event().query(), "an event that was never recorded"


def test_events_take_time(schedule: str) -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(N, device="cuda").add_(1)
    end.record()
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) < 1e4


def test_streams_come_from_a_pool_of_32() -> None:
    streams = [torch.cuda.Stream() for _ in range(33)]
    assert streams[0] == streams[32]
    assert len(set(streams)) == 32


def test_an_error_of_a_kernel_comes_with_the_next_synchronization() -> None:
    weight = torch.ones(4, 4, device="cuda")
    torch.nn.functional.embedding(torch.tensor([9], device="cuda"), weight)
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        torch.cuda.synchronize()
    torch.cuda.synchronize()


# --- memory


def test_a_freed_block_is_reused_at_once_by_its_stream_alone(schedule: str, side: torch.cuda.Stream) -> None:
    first = torch.ones(N, device="cuda")
    doubled = first * 2
    address = first.data_ptr()
    del first
    with torch.cuda.stream(side):
        assert torch.ones(N, device="cuda").data_ptr() != address
    second = torch.full((N,), 5.0, device="cuda")
    assert second.data_ptr() == address
    assert doubled.tolist() == [2.0] * N


def test_a_freed_block_is_poisoned_in_the_order_of_its_stream(side: torch.cuda.Stream) -> None:
    tensor = torch.ones(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = tensor * 2  # reads it too late
    del tensor
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(side):
        assert all(value != value for value in copied.tolist())


def test_record_stream_keeps_a_block_from_reuse(schedule: str, side: torch.cuda.Stream) -> None:
    tensor = torch.ones(N, device="cuda")
    address = tensor.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        copied = tensor * 2
        tensor.record_stream(side)
    del tensor
    other = torch.zeros(N, device="cuda")
    torch.cuda.current_stream().synchronize()
    assert schedule != "lazy" or other.data_ptr() != address
    with torch.cuda.stream(side):
        assert copied.tolist() == [2.0] * N


def test_memory_is_counted_as_pytorch_does() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    tensor = torch.empty(1000, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 1024, "a multiple of 512"
    del tensor
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 1024
    reserved = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved


def test_out_of_memory() -> None:
    torch.cuda.empty_cache()
    in_use = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    assert free == total - in_use
    torch.cuda.set_per_process_memory_fraction((in_use + 2**20) / 2**34)
    try:
        first = torch.empty(2**19, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1024\.00 KiB"):
            torch.empty(2**20, dtype=torch.uint8, device="cuda")
        del first
        torch.empty(2**20, dtype=torch.uint8, device="cuda")  # the cache gives back what is free
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# --- copies


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pageable_memory_is_read_at_once_and_pinned_memory_when_the_copy_runs(is_pinned: bool) -> None:
    source = torch.ones(N).pin_memory() if is_pinned else torch.ones(N)
    assert source.is_pinned() is is_pinned
    target = source.to("cuda", non_blocking=True)
    source.fill_(7.0)  # too early for pinned memory
    assert target.tolist() == [7.0 if is_pinned else 1.0] * N


def test_pinned_memory_is_written_when_the_copy_runs_or_at_once_if_it_blocks() -> None:
    target = torch.zeros(N).pin_memory()
    target.copy_(torch.ones(N, device="cuda"), non_blocking=True)
    assert target.tolist() == [0.0] * N
    torch.cuda.synchronize()
    assert target.tolist() == [1.0] * N
    target.copy_(torch.full((N,), 2.0, device="cuda"))
    assert target.tolist() == [2.0] * N


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_to_pageable_memory_synchronizes(non_blocking: bool) -> None:
    source = torch.ones(N, device="cuda") * 3
    assert torch.zeros(N).copy_(source, non_blocking=non_blocking).tolist() == [3.0] * N
    assert source.to("cpu", non_blocking=True).is_pinned(), "so that this one does not"


def test_registered_memory_is_pinned_until_it_is_not() -> None:
    flat = torch.frombuffer(bytearray(8192), dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert cudart.cudaHostRegister(flat.data_ptr(), 8192, 1) == 0
    assert flat[100:].is_pinned()
    assert cudart.cudaHostRegister(flat.data_ptr(), 8192, 1) == 712
    torch.ones(8192, dtype=torch.uint8, device="cuda")
    flat.copy_(torch.ones(8192, dtype=torch.uint8, device="cuda"), non_blocking=True)
    assert cudart.cudaHostUnregister(flat.data_ptr()) == 0
    assert not flat.is_pinned()
    assert cudart.cudaHostUnregister(flat.data_ptr()) == 713
    with pytest.raises(torch.AcceleratorError, match="an illegal memory access"):  # the copy comes too late
        torch.cuda.synchronize()


def test_pinned_memory_of_pytorch_is_not_reused_under_a_copy() -> None:
    source = torch.ones(N).pin_memory()
    address = source.data_ptr()
    target = source.to("cuda", non_blocking=True)
    del source
    assert torch.zeros(N).pin_memory().data_ptr() != address
    assert target.tolist() == [1.0] * N


# --- ops


def test_of_the_host_only_scalars_are_read_and_that_at_the_launch() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda") + torch.ones(3)
    factor = torch.tensor(2.0)
    out = torch.ones(N, device="cuda") * factor
    factor.fill_(9.0)
    assert out.tolist() == [2.0] * N


def test_views_share_memory_and_run_at_once() -> None:
    tensor = torch.arange(12.0, device="cuda").reshape(3, 4)
    view = tensor.t()[1:, ::2]
    assert view.data_ptr() == tensor.data_ptr() + 4
    view.zero_()
    assert tensor.tolist() == [[0.0, 0.0, 0.0, 0.0], [4.0, 5.0, 6.0, 7.0], [8.0, 0.0, 0.0, 0.0]]


def test_the_shape_of_a_result_may_depend_on_data() -> None:
    tensor = torch.tensor([1.0, -1.0, 2.0], device="cuda")
    assert tensor[tensor > 0].tolist() == [1.0, 2.0]
    assert tensor.nonzero().tolist() == [[0], [1], [2]]
    tensor[tensor < 0] = 5.0
    assert tensor.tolist() == [1.0, 5.0, 2.0]


def test_random_numbers_come_from_seed_and_offset(schedule: str) -> None:
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    assert state.numel() == 16
    first, second = (torch.rand(8, device="cuda") for _ in range(2))
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    on_cpu = torch.get_rng_state()
    assert torch.equal(torch.rand(8, device="cuda"), first)
    dropped = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5)
    assert set(dropped.tolist()) == {0.0, 2.0}
    assert torch.equal(torch.get_rng_state(), on_cpu)
    own = torch.Generator("cuda").manual_seed(3)
    assert torch.equal(torch.rand(8, device="cuda", generator=own), first)


def test_bits_do_not_depend_on_the_threads_of_the_host() -> None:
    x, weight, grad = (torch.randn(*shape, device="cuda") for shape in ((4, 1, 64), (2, 1, 3), (4, 2, 64)))
    results = []
    num_threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            slope = torch.nn.grad.conv1d_weight(x, weight.shape, grad, padding=1)
            results.append((slope.cpu(), torch.linspace(0, 1, 10**5, device="cuda").sum().cpu()))
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(num_threads)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("seed", range(12))
def test_record_stream_waits_for_what_the_stream_has_by_the_time_of_the_free(seed: int) -> None:
    """Not for what it had when the use was recorded: CUDA's allocator records its events at the free."""
    use_schedule(f"random:{seed}")
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.ones(N, device="cuda")
    current.wait_stream(side)
    tensor.record_stream(current)
    copies = [tensor.clone() for _ in range(8)]
    del tensor
    for _ in range(8):  # the allocator looks for blocks to reuse
        torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    assert all(torch.equal(copied.cpu(), torch.ones(N)) for copied in copies)


def test_dropout_that_another_thread_waits_for_leaves_the_draws_on_the_cpu_alone() -> None:
    x, is_over, has_begun = torch.ones(1 << 16, device="cuda"), threading.Event(), threading.Event()

    def draws() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [torch.randn(1 << 16) for _ in range(60)]

    def drop() -> None:
        while not is_over.is_set():
            torch.nn.functional.dropout(x)
            torch.cuda.synchronize()
            has_begun.set()

    expected, thread = draws(), threading.Thread(target=drop)
    thread.start()
    has_begun.wait()
    try:
        assert all(map(torch.equal, draws(), expected))
    finally:
        is_over.set()
        thread.join()
