"""The private names of PyTorch still mean what the `_compat` modules take them for."""

from __future__ import annotations

import inspect
import operator
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.hard_modules import Mlp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

import graphckpt
from graphckpt import _compat, _compat_compiler, _compat_distributed, _compat_fake, _compat_memory
from graphckpt._compat import FakeTensorMode, call_with_autocast
from graphckpt._compat_compiler import never_compiled
from graphckpt.ledger.live_memory import LiveBytes


def test_active_hooks_are_the_innermost_pair() -> None:
    assert _compat.active_saved_tensor_hooks() is None

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(lambda t: t, lambda t: t), saved_tensors_hooks(pack, pack):
        hooks = _compat.active_saved_tensor_hooks()
    assert hooks is not None
    assert hooks[0] is pack
    assert _compat.active_saved_tensor_hooks() is None


def test_a_version_sharing_alias_sees_later_edits() -> None:
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.exp.default:
                seen.append((_compat.version_sharing_detach(out), out.detach()))
            return out

    with Mode():
        y = torch.ones(2, requires_grad=True).exp()
    shared, alone = seen[0]
    versions = shared._version, alone._version
    y.add_(1)
    assert shared._version > versions[0]
    assert alone._version == versions[1], "a plain detach() would do: version_sharing_detach can go"


def test_resize_is_a_method_of_a_base_class_that_a_class_attribute_replaces() -> None:
    assert "resize_" not in vars(torch.UntypedStorage), "or the replacement cannot be deleted to remove it"
    reported: list[int] = []
    x = torch.zeros(4)
    with _compat_memory.resizes_reported_to(lambda storage: reported.append(storage.nbytes())):
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(32)
    x.untyped_storage().resize_(0)
    assert reported == [0, 32]
    assert "resize_" not in vars(torch.UntypedStorage)


class CountEntries(TorchDispatchMode):
    """A mode of a user's, which notes when it is entered and what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.num_entries = 0
        self.ops: list[str] = []

    def __enter__(self) -> Any:
        self.num_entries += 1
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class Renames(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.cos(*args) if func is torch.sin else func(*args, **(kwargs or {}))


def test_foreign_modes_are_those_of_users_innermost_last() -> None:
    assert _compat.foreign_modes() == ((), ())
    outer, inner, function = CountEntries(), CountEntries(), Renames()
    with torch.device("cpu"), LiveBytes(), FakeTensorMode(), FlopCounterMode(display=False), outer, inner, function:
        assert _compat.foreign_modes() == ((function,), (outer, inner))
    assert _compat.foreign_modes() == ((), ())


def test_modes_are_active_without_being_entered_and_go_as_a_whole() -> None:
    mode, function, user = CountEntries(), Renames(), CountEntries()
    with user, torch.device("cpu"):
        before = _compat.active_modes()
        assert [*map(len, before)] == [1, 1, 3]  # PyTorch's own flags: a `with` of a dispatch mode sets and resets them
        _compat.push_modes([function], [mode])
        assert _compat.foreign_modes() == ((function,), (user, mode))
        assert torch.sin(torch.zeros(1)).item() == 1
        left = CountEntries()
        left.__enter__()
        _compat.set_active_modes(before)
        _compat.set_active_modes(before)
        assert _compat.active_modes() == before
    assert mode.num_entries == 0
    assert mode.ops == ["aten.zeros.default", "aten.cos.default", "aten._local_scalar_dense.default"]
    assert _compat.active_modes() == _compat.NO_MODES
    assert not _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=True)
    _compat.set_active_modes(before)
    assert _compat.active_modes() == before
    _compat.set_active_modes(_compat.NO_MODES)
    assert not _python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=True)


def test_global_forward_hooks_are_where_torch_registers_them() -> None:
    pre_hooks, hooks = _compat.global_forward_hooks()
    module = nn.modules.module
    handles = [
        module.register_module_forward_pre_hook(lambda *_: None),
        module.register_module_forward_hook(lambda *_: None, always_call=True),
    ]
    try:
        assert [len(each) for each in pre_hooks] == [1]
        assert [len(each) for each in hooks] == [1, 0, 1]
    finally:
        for handle in handles:
            handle.remove()
    assert not any([*pre_hooks, *hooks])


def test_a_hook_is_found_and_removed_without_its_handle() -> None:
    layer, seen = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    tables = [value for owner in (layer, optimizer) for name, value in vars(owner).items() if "_hooks" in name]
    before = [dict(table) for table in tables]
    of_all = sys.modules[register_optimizer_step_pre_hook.__module__]
    ways = {
        "pre": (layer, partial(layer.register_forward_pre_hook, with_kwargs=True)),
        "forward": (layer, partial(layer.register_forward_hook, with_kwargs=True, always_call=True)),
        "gradient": (layer.weight, layer.weight.register_hook),
        "accumulated": (layer.bias, layer.bias.register_post_accumulate_grad_hook),
        "optimizer": (optimizer, optimizer.register_step_pre_hook),
        "all optimizers, before": (of_all, register_optimizer_step_pre_hook),
        "all optimizers, behind": (of_all, register_optimizer_step_post_hook),
    }
    hooks = {}
    for name, (_, register) in ways.items():
        hooks[name] = lambda *_, name=name: seen.append(name)
        register(hooks[name])
    step()
    assert set(seen) == set(ways)
    for name, (owner, _) in ways.items():
        _compat.forget_hook(weakref.ref(owner), hooks[name])
        _compat.forget_hook(weakref.ref(owner), hooks[name])
    seen.clear()
    step()
    assert seen == []
    assert [dict(table) for table in tables] == before


def test_autocast_for_any_kind_of_device_shows_without_its_name() -> None:
    assert not _compat.is_any_autocast_enabled()
    for kind in ("cpu", "cuda"):
        torch.set_autocast_enabled(kind, True)
        try:
            assert _compat.is_any_autocast_enabled()
        finally:
            torch.set_autocast_enabled(kind, False)
    assert not _compat.is_any_autocast_enabled()


def test_enabled_attention_kernels_are_the_same_without_python() -> None:
    cuda = torch.backends.cuda
    public = cuda.math_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel([backend]):
            enabled = [is_enabled() for is_enabled in _compat.attention_kernels_enabled]
            assert enabled == [is_enabled() for is_enabled in public]
            assert sum(enabled) == 1


def test_the_accelerator_is_the_same_without_python() -> None:
    assert _compat.current_accelerator() == torch.accelerator.current_accelerator()


def test_other_threads_are_counted_while_they_run() -> None:
    before, event = _compat.num_other_threads(), threading.Event()
    threads = [threading.Thread(target=event.wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert _compat.num_other_threads() == before + 2
    event.set()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10  # a thread is joined just before it is no longer counted
    while _compat.num_other_threads() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert _compat.num_other_threads() == before


def test_views_and_detached_tensors_share_a_version_counter() -> None:
    x = torch.ones(4)
    part, _ = torch.unsafe_chunk(x, 2)
    others = x, x[:2], x.detach(), x.data, part, x.clone()
    assert [_compat.share_version_counter(x, other) for other in others] == [True, True, True, False, False, False]
    assert x._version == x.data._version == 0, "the versions are as before"


class ReadsAutocast(TorchDispatchMode):
    """Notes whether autocast is active in a mode, and in what an op's kernel calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[no-untyped-def]
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return call_with_autocast(func, args, kwargs or {})


def test_a_mode_sets_autocast_aside_and_kernels_have_it_again() -> None:
    i, j, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.bilinear(i, j, weight, None)
        with ReadsAutocast() as mode:
            found = torch.bilinear(i, j, weight, None)
        assert torch.is_autocast_enabled("cpu")
    assert not any(mode.seen), "a mode is within autocast: call_with_autocast can go"
    assert torch.equal(found, expected)
    assert not torch.equal(found, torch.bilinear(i, j, weight, None))


def test_autocast_that_is_off_within_itself_stays_off() -> None:
    i, j, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 8, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False), ReadsAutocast():
        assert torch.equal(torch.bilinear(i, j, weight, None), torch.bilinear(i, j, weight, None))
        found = torch.bilinear(i, j, weight, None)
    assert torch.equal(found, torch.bilinear(i, j, weight, None))


def test_transforms_and_tensors_that_are_not_plain_are_known() -> None:
    seen: list[Any] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append((_compat.is_transformed(), _compat.what_is_not_plain(tensor), _compat.storage_of(tensor)))
        return tensor * 2

    x = torch.ones(4, 4)
    torch.func.vmap(look)(x)
    with forward_ad.dual_level():
        look(x)
    look(x.to_sparse())
    look(x)
    assert seen[0] == (True, "torch.func", None)
    assert seen[1][:2] == (True, None)
    assert seen[2] == (False, "sparse", None)
    assert seen[3][:2] == (False, None)
    assert seen[3][2] is x.untyped_storage()
    assert _compat.what_is_not_plain(torch._efficientzerotensor(4)) == "zero"


def test_early_stop_is_what_the_context_manager_says() -> None:
    assert [_compat.early_stop_active(wanted) for wanted in (True, False)] == [True, False]
    for enabled in (True, False):
        with set_checkpoint_early_stop(enabled):
            assert [_compat.early_stop_active(wanted) for wanted in (True, False)] == [enabled, enabled]


def test_frames_of_modules_show_their_hooks_that_are_always_called() -> None:
    found = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(_compat.has_always_called_hooks(sys._getframe()))
            return x

    module = Looks()
    for always_call in (False, True):
        module.register_forward_hook(lambda *_: None, always_call=always_call)
        nn.Sequential(nn.Sequential(module))(torch.ones(1))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None, always_call=True)
    Looks()(torch.ones(1))
    handle.remove()
    Looks()(torch.ones(1))
    assert found == [False, True, True, False]
    assert _compat._CALL_WITH_HOOKS is not _compat._CALL, "modules without hooks are asked too, which takes longer"


def test_hooks_on_gradients_are_numbered_and_put_back() -> None:
    weight = nn.Parameter(torch.ones(2))
    x = weight * 2
    x.register_hook(lambda grad: grad * 3)
    tensors = [weight, x, weight.detach()]

    def register() -> int:
        first = RemovableHandle.next_id
        weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
        for tensor in tensors[:2]:
            tensor.register_hook(lambda grad: grad * 100)
            node = torch.autograd.graph.get_gradient_edge(tensor).node
            node.register_prehook(lambda grads: (grads[0] * 100,))
            node.register_hook(lambda *_: calls.append("node"))
        return RemovableHandle.next_id - first

    calls: list[str] = []
    restorations = _compat.gradient_hooks(tensors)
    assert len(restorations) == 2
    x._backward_hooks.clear()
    assert register() == 7
    for function, args in restorations:
        function(*args)
    x.sum().backward()
    assert weight.grad.tolist() == [6.0, 6.0]
    assert calls == []


def test_attributes_of_scripted_modules() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.number, self.names = nn.Linear(2, 2), 3, ["a"]
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("total", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            return self.linear(x) * self.weight * self.total + len(self.names) + self.number

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated")
        module = torch.jit.script(Counts())
        traced = torch.jit.trace(nn.BatchNorm1d(2).eval(), torch.ones(3, 2), check_trace=False)
    names = _compat.scripted_attributes(module)
    assert {"total", "number", "names", "training"} <= set(names)
    assert not {"weight", "linear"} & set(names)
    assert "running_mean" in _compat.scripted_attributes(traced)
    module.number = 7
    module(torch.ones(1, 2))
    assert (module.number, module.names) == (8, ["a"])
    assert module.names is not module.names, "a reference would do: containers need not be put back"
    assert _compat.has_scripted_code()


def test_the_cache_of_parametrizations_is_seen() -> None:
    assert not _compat.parametrizations_are_cached()
    with nn.utils.parametrize.cached():
        assert _compat.parametrizations_are_cached()


def test_clones_of_saved_tensors_are_seen() -> None:
    assert not _compat.saved_tensors_are_cloned()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert _compat.saved_tensors_are_cloned()


def test_batch_norm_moves_its_statistics_without_a_version_bump() -> None:
    """Why buffers are compared by value on a first call; if this fails, versions would do."""
    norm = torch.nn.BatchNorm1d(2)
    version = norm.running_mean._version
    norm(torch.randn(4, 2))
    assert norm.running_mean._version == version


def test_a_hook_within_compiled_code_is_not_compiled() -> None:
    seen = []

    @never_compiled
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return looked_at(tensor)

    def looked_at(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() * 1

    frames = CompileCounterWithBackend("eager")
    layer = nn.Linear(4, 4)  # before torch 2.14, PyTorch's own code is not compiled, but what it calls would be
    layer.compile(backend=frames)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    assert seen
    assert not any("mul" in graph.code for graph in frames.graphs)


def _gradients(within: AbstractContextManager[Any]) -> list[torch.Tensor | None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Mlp(0.5)
    run = torch.compile(layer, backend="aot_eager")
    torch.manual_seed(1)
    with within:
        loss = run(torch.ones(64, 16)).square().mean()
    loss.backward()
    torch._dynamo.reset()
    return [parameter.grad for parameter in layer.parameters()]


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_compiler_that_saves_less_draws_other_numbers_unless_it_is_told_not_to() -> None:
    """Once the first half fails, `saving` need mark nothing."""
    expected = _gradients(nullcontext())
    knob = _gradients(functorch.patch(activation_memory_budget=0.1))
    assert not all(torch.equal(a, b) for a, b in zip(knob, expected, strict=True))
    marked = _gradients(_compat_compiler.saving(0.1))
    assert all(torch.equal(a, b) for a, b in zip(marked, expected, strict=True))
    assert functorch.activation_memory_budget == 1.0


def test_an_export_is_told_from_a_compilation() -> None:
    """``torch.compiler.is_exporting`` would do, but for torch 2.11, where it is ``True`` for both."""

    class Doubles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if _compat_compiler.is_exporting() else x * 3

    x = torch.ones(2)
    assert torch.equal(torch.compile(Doubles(), backend="eager", fullgraph=True)(x), x * 3)
    for strict in (False, True):
        assert torch.equal(torch.export.export(Doubles(), (x,), strict=strict).module()(x), x * 2)
    torch._dynamo.reset()


def test_ops_that_draw_random_numbers_are_recognized() -> None:
    aten = torch.ops.aten
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    draws = [
        graph.call_function(aten.bernoulli.p, (x, 0.5)),
        graph.call_function(aten.rand_like.default, (x,)),
        graph.call_function(aten._scaled_dot_product_flash_attention.default, (x, x, x, 0.1)),
    ]
    for node in draws:
        assert _compat_compiler._is_random(node), node.target
    for target, args in (
        (aten.gelu.default, (x,)),
        (aten._scaled_dot_product_flash_attention.default, (x, x, x, 0.0)),
        (operator.getitem, (x, 0)),
    ):
        assert not _compat_compiler._is_random(graph.call_function(target, args)), target


def test_equal_compilers_are_equal() -> None:
    for backend in ("inductor", "aot_eager"):
        made = [_compat_compiler.compiler_of(backend, None, None, dynamic) for dynamic in (None, None, True)]
        one, same, other = made
        assert one == same
        assert one != other


def test_modes_and_profilers_do_not_see_unobserved_ops() -> None:
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    mode = ReadsAutocast()
    with torch.autocast("cpu", torch.bfloat16), mode:
        with torch.profiler.profile() as profile, _compat_compiler.unobserved():
            product = torch.mm(x, y)
        assert not mode.seen
        assert not [event.name for event in profile.events() if event.name.startswith("aten::")]
        assert not product.requires_grad
        assert product.dtype is torch.float32
        with torch.profiler.profile() as profile:
            torch.mm(x, y)
    assert mode.seen, "what comes after is seen again"
    assert [event.name for event in profile.events() if event.name == "aten::mm"]


def test_a_class_with_ops_of_its_own_is_told_from_a_plain_one() -> None:
    x = torch.randn(4)
    plain = x, nn.Parameter(x), nn.Buffer(x), x.as_subclass(type("Named", (torch.Tensor,), {}))
    assert not any(map(_compat.has_own_dispatch, plain))
    fake = torch._subclasses.FakeTensorMode().from_tensor(x)
    assert all(map(_compat.has_own_dispatch, (fake, _compat.WithoutValues.like(x))))


def test_norms_of_several_tensors() -> None:
    tensors = torch.randn(10).split([3, 5, 2])
    assert torch.allclose(_compat.norms_of(tensors), torch.stack([tensor.norm() for tensor in tensors]))


def test_a_fake_group_has_no_peer() -> None:
    hook = sys.excepthook
    _compat_distributed.start_fake_group(1024, 5)
    try:
        assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (1024, 5, "fake")
        dist.all_reduce(torch.ones(2))
        methods = [name for name in _compat_distributed.MESH_READERS if hasattr(dist.device_mesh.DeviceMesh, name)]
        assert {"__init__", "__getitem__", "_flatten"} <= {*methods}
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_ddp_takes_its_reducer_from_the_package() -> None:
    assert all(hasattr(dist, name) for name in _compat_distributed.DDP_NAMES)
    source = inspect.getsource(torch.nn.parallel.distributed) + inspect.getsource(dist.utils)
    assert all(f"dist.{name}(" in source for name in _compat_distributed.DDP_NAMES)
    wide, narrow = torch.zeros(300), torch.zeros(100, dtype=torch.float64)
    buckets = _compat_distributed.bucket_assignment([wide, wide, narrow, wide, wide], [1200, 2400], [4, 3, 2, 1, 0])
    assert buckets == [[4], [3, 1], [2], [0]]


def test_schedules_vote_on_shapes_in_one_method() -> None:
    base = _compat_distributed.schedule_of_stages()
    assert issubclass(pipelining.Schedule1F1B, base)
    assert issubclass(pipelining.ScheduleInterleaved1F1B, base)
    if not hasattr(base, _compat_distributed.WARM_UP):
        return  # an older release infers shapes only if a stage has none
    parameters = inspect.signature(getattr(base, _compat_distributed.WARM_UP)).parameters
    assert [*parameters] == ["self", "stages", "has_backward", "p2p_done"]


def test_a_callback_runs_at_the_end_of_backward() -> None:
    order: list[str] = []
    x, y = (torch.ones(1, requires_grad=True) for _ in range(2))

    def on_gradient(_: torch.Tensor) -> None:
        order.append("x")
        _compat_distributed.queue_backward_callback(lambda: order.append("end"))

    x.register_hook(on_gradient)
    y.register_hook(lambda _: order.append("y"))
    ((y * 2).exp() + x).sum().backward()
    assert order[-1] == "end"
    assert set(order) == {"x", "y", "end"}


def test_functions_run_outside_of_modes() -> None:
    values = _compat_distributed.without_modes(lambda: torch.arange(3).tolist())
    with FakeTensorMode(), torch.device("meta"):
        assert values() == [0, 1, 2]


def test_the_caches_of_dtensor_are_emptied() -> None:
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    hook = sys.excepthook
    _compat_distributed.start_fake_group(2, 0)
    try:
        with _compat_distributed.own_dtensor_caches():
            distribute_tensor(torch.ones(4), dist.device_mesh.init_device_mesh("cpu", (2,)), [Shard(0)]).sum()
        assert propagator.propagate_op_sharding.cache.cache_info().currsize == 0
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def test_nothing_private_is_imported_elsewhere() -> None:
    package = Path(graphckpt.__file__).parent
    allowed = {"torch.utils._python_dispatch"}  # TorchDispatchMode lives there; PyTorch documents the class
    for path in package.rglob("*.py"):
        if path.name not in ("_compat.py", "_compat_compiler.py", "_compat_distributed.py", "_compat_fake.py"):
            found = re.findall(r"(?:from|import) (torch(?:\.\w+)*\._\w+[\w.]*)", path.read_text())
            assert set(found) <= allowed, (path.name, found)
            assert "torch._C" not in path.read_text(), path.name


def _ops_on_fakes() -> list[Callable[[], Any]]:
    """Ops whose results a cache must not mix up: equal shapes, other strides, types, scalars or history."""
    x, y = torch.ones(4, 6), torch.ones(6, 4).t()
    ids, weight = torch.zeros(4, dtype=torch.int64), torch.nn.Parameter(torch.ones(6, 6))
    ops: list[Callable[[], Any]] = [
        lambda: x + 1,
        lambda: x + 1.0,
        lambda: ids + 1,
        lambda: ids + 1.0,
        lambda: y + 1,
        lambda: x[1:] + 1,
        lambda: x.add_(1),
        lambda: x.to(torch.bfloat16),
        lambda: torch.nn.functional.linear(x, weight),
        lambda: torch.nn.functional.layer_norm(x, (6,)),
        lambda: torch.add(x, 1, out=torch.empty(0)),
        lambda: torch.cat([x, y]),
        x.sum,
        lambda: torch.arange(5),
        lambda: torch.arange(5.0),
        lambda: x.unfold(0, 2, 1),
        lambda: x.view(torch.int32),
        lambda: torch.complex(x, x) * 1j,
        lambda: torch._foreach_sqrt([x, y, x[1:]]),
        lambda: torch._foreach_add([x, y], [1, 2.0]),
        lambda: torch._foreach_mul([ids, x], [1, 2.0]),
    ]
    return ops


def _kinds_of(result: Any) -> list[Any]:
    return [
        (
            *(t.shape, t.stride(), t.dtype, t.device, t.storage_offset(), t.untyped_storage().nbytes()),
            *(t.requires_grad, str(torch._C._dispatch_keys(t)), sorted(vars(t))),
        )
        for t in torch.utils._pytree.tree_leaves(result)
    ]


@pytest.mark.parametrize("number", range(len(_ops_on_fakes())))
def test_remembered_results_of_fake_ops_are_those_of_pytorch(number: int) -> None:
    """Runs an op after all others, and twice, so that each result comes from the cache where that is possible."""
    with FakeTensorMode():
        expected = _kinds_of(_ops_on_fakes()[number]())
    with _compat_fake.FakeTensors():
        for op in _ops_on_fakes():
            op()
        again = [_kinds_of(_ops_on_fakes()[number]()) for _ in range(2)]
    assert again == [expected, expected]


def test_remembered_results_have_their_own_storage() -> None:
    with _compat_fake.FakeTensors():
        x = torch.ones(8)
        results = [x + 1 for _ in range(3)]
        assert len({id(result.untyped_storage()) for result in [x, *results]}) == 4
        assert x.add_(1) is x
        assert (x.relu_() is x, x.relu_() is x) == (True, True)


def test_equal_layers_are_dispatched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatched: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def spy(mode: Any, func: Any, *arguments: Any) -> Any:
        dispatched.append(func)
        return dispatch(mode, func, *arguments)

    monkeypatch.setattr(FakeTensorMode, "dispatch", spy)
    counts = []
    for num_layers in (2, 4, 32):  # in the first, PyTorch's own cache is empty
        dispatched.clear()
        with _compat_fake.FakeTensors():
            layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)) for _ in range(num_layers)]
            for parameter in torch.nn.Sequential(*layers).parameters():
                parameter.grad = torch.ones_like(parameter)
            begin = len(dispatched)
            torch.nn.Sequential(*layers)(torch.ones(2, 8)).sum().backward()
        counts.append(len(dispatched) - begin)
    assert counts[1] == counts[2] < 40


def test_optimizers_of_lists_are_dispatched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, names = FakeTensorMode.dispatch, []

    def spy(mode: Any, func: Any, *arguments: Any) -> Any:
        names.append(func.overloadpacket.__name__)
        return dispatch(mode, func, *arguments)

    monkeypatch.setattr(FakeTensorMode, "dispatch", spy)
    with _compat_fake.FakeTensors():
        lists = [torch.ones(8) for _ in range(4)]
        for _ in range(3):
            torch._foreach_sqrt(lists)
        with pytest.raises(_compat_fake.NoValueError):
            lists[0].sum().item()
        assert torch.tensor(2.5).item() == 2.5
    assert names.count("_foreach_sqrt") == 1
    assert "_local_scalar_dense" not in names


def test_a_gradient_scaler_is_as_new_and_answers_without_values() -> None:
    scaler, new = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert not _compat_fake.is_scaler_for_cuda(scaler)
    answers = _compat_fake.SCALER_WITHOUT_VALUES
    steps: list[object] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))

    def states_of(scaler: Any) -> list[float]:
        names = "get_scale", "_get_growth_tracker"
        states = [getattr(scaler, name)() for name in names]
        assert [answers[name](scaler) for name in names] == states
        return states

    assert states_of(scaler) == [8.0, 0]
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    assert vars(scaler)["_scale"] is not None
    scaler.step(optimizer)
    answers["_maybe_opt_step"](scaler, optimizer, {})
    assert len(steps) == 2
    assert vars(scaler).keys() >= _compat_fake.attributes_of_new_scaler(scaler).keys()
    vars(scaler).update(_compat_fake.attributes_of_new_scaler(scaler))
    assert vars(scaler) == vars(new)
    assert states_of(torch.amp.GradScaler("cpu", enabled=False)) == [1.0, 0]


def test_a_message_that_a_device_cannot_hold_is_cut_off() -> None:
    with pytest.raises(RuntimeError, match=r"^block: ä+$"):
        _compat.assert_on_device(torch.tensor(False), "block: " + 200 * "ä")


def test_make_fx_is_seen() -> None:
    seen = []
    make_fx(lambda x: seen.append(_compat.is_traced_by_fx()) or x + 1)(torch.ones(1))
    assert (seen, _compat.is_traced_by_fx()) == ([True], False)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", "mean"), ("sum", "sum"), ("none", None)])
def test_losses_say_how_they_reduce(reduction: str, expected: str | None) -> None:
    x, labels = torch.randn(4, 3, requires_grad=True), torch.zeros(4, dtype=torch.long)
    losses = [
        nn.functional.cross_entropy(x, labels, reduction=reduction),
        nn.functional.mse_loss(x, torch.zeros(4, 3), reduction=reduction).double(),
    ]
    assert [_compat.reduction_of(loss) for loss in losses] == [expected] * 2
    assert _compat.reduction_of(x.mean()) is _compat.reduction_of(x.detach()) is None
