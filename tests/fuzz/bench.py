"""Runs the steps of a random programme, and notes all that they may change."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import graphckpt
from fuzz.layers import D
from graphckpt.engine.execution import running

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Bench:
    """A model in training: what a step shape calls it through, and what was seen so far."""

    def __init__(self, model: nn.Module, handle: graphckpt.Handle | None) -> None:
        self.model = model
        self.handle = handle
        self.seen: dict[str, Any] = {}
        self._inputs = torch.Generator().manual_seed(1)
        self._given: list[Tensor] = []
        self._number = 0
        self._autocast = False
        self._needs_grad = True

    def begin(self, number: int, *, autocast: bool = False, needs_grad: bool = True) -> None:
        self._number, self._autocast, self._needs_grad = number, autocast, needs_grad
        self._given = []

    def input(self, batch: int = 4) -> Tensor:
        """Returns a new input, which is no draw from the default random stream."""
        x = torch.randn(batch, D, generator=self._inputs).to(DEVICE).requires_grad_(self._needs_grad)
        self._given.append(x)
        return x

    def draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._inputs))

    def call(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16) if self._autocast else nullcontext():
            y = self.model(x)
        self.see("output", y)
        return y.float()

    def see(self, name: str, value: Any) -> None:
        """Notes a value under a name of its own."""
        name = f"step {self._number}: {name}"
        while name in self.seen:
            name += "'"
        self.seen[name] = frozen(value)

    def end(self) -> None:
        """Notes gradients, buffers, attributes, parameters and the place in the random stream."""
        for number, x in enumerate(self._given):
            self.see(f"gradient of input {number}", x.grad)
        for name, parameter in self.model.named_parameters():
            self.see(f"gradient of {name}", parameter.grad)
            self.see(f"parameter {name}", parameter)
        for name, buffer in self.model.named_buffers():
            self.see(f"buffer {name}", buffer)
        for name, module in self.model.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "forward":
                    self.see(f"attribute {name}.{key}", value)
        self.see("RNG state", torch.get_rng_state())
        if DEVICE.type == "cuda":
            self.see("RNG state of the device", torch.cuda.get_rng_state())
        self.see("RNG state of Python", str(random.getstate()))
        _, key, *place = np.random.get_state()  # noqa: NPY002
        self.see("RNG state of NumPy", [key.tobytes().hex(), *map(str, place)])


def frozen(value: Any) -> Any:
    """Returns a copy of a value that can be compared later."""
    if isinstance(value, Tensor):
        return value.detach().to_dense().clone(), value.requires_grad
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same in every bit; all NaN are one."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.dtype.is_floating_point and bool((a.isnan() | b.isnan()).any()):
            return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def differing(ours: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Names what is not the same, in the order in which it was seen."""
    names = [name for name in plain if name not in ours or not same(ours[name], plain[name])]
    return names + [name for name in ours if name not in plain]


def left_behind(stores: set[Any]) -> list[str]:
    """Names what a run has left active, or in one of its stores, now that its model is gone."""
    modes = torch.overrides._get_current_function_mode_stack()
    is_there = {
        "a run that has not ended": running.get() is not None,
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "a mode": bool(modes) or torch.utils._python_dispatch._get_current_dispatch_mode() is not None,
        "gradients that are off": not torch.is_grad_enabled(),
    }
    found = [name for name, is_left in is_there.items() if is_left]
    if any(getattr(store, "num_alive", 0) for store in stores):
        gc.collect()
        found += [f"{n} tensors alive in a store" for store in stores if (n := getattr(store, "num_alive", 0))]
    return found


def run(
    make_model: Callable[[], nn.Module],
    rules: dict[str, Any] | None,
    steps: list[tuple[Any, dict[str, Any]]],
    determinism_check: str = "default",
) -> dict[str, Any]:
    """Runs the steps under ``rules``, or as the plain model if they are ``None``, and returns what was seen."""
    model = make_model().to(DEVICE)
    handle = None if rules is None else graphckpt.apply(model, rules, determinism_check=determinism_check)
    bench = Bench(model, handle)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.5)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    with graphckpt.blocks.disable_checkpointing() if rules is None else nullcontext():
        for number, (shape, options) in enumerate(steps):
            bench.begin(number, **options)
            shape(bench)
            bench.end()
            optimizer.step()
            optimizer.zero_grad()
    seen, stores = bench.seen, set()
    if handle is not None:
        stores = {wrapper.context.store for wrapper in handle._wrappers}
        handle.remove()
    for module in model.modules():  # `spectral_norm` leaves a weight with history, and with it its last call
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(module, key, value.detach())
    del model, handle, bench, optimizer
    _end_work()
    return seen | {"left behind": left_behind(stores)}


class Captured(graphckpt.Graph):
    """A plain training step of a model, captured after some calls."""

    def __init__(self, model: nn.Module, capture: str) -> None:
        super().__init__()
        self.model = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        rate = torch.tensor(0.05, device=DEVICE)  # as a capture has it; a float has other bits for float64 parameters
        self.add_optimizer(torch.optim.SGD(parameters, lr=rate, momentum=0.5, fused=True))
        self.config.capture = capture

    def build(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().pow(2).mean()
        loss.backward()
        return loss


def run_captured(
    make_model: Callable[[], nn.Module], rules: dict[str, Any] | None, capture: str, determinism_check: str = "default"
) -> dict[str, Any]:
    """Runs seven steps of a Graph: three to warm up, then one that is captured, and its replays."""
    model = make_model().to(DEVICE)
    handle = None if rules is None else graphckpt.apply(model, rules, determinism_check=determinism_check)
    graph, inputs = Captured(model, capture), torch.Generator().manual_seed(1)
    torch.manual_seed(5)
    seen = {f"loss {number}": frozen(graph(torch.randn(4, D, generator=inputs).to(DEVICE))) for number in range(7)}
    seen |= {name: frozen(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    seen["RNG state of the device"] = torch.cuda.get_rng_state()
    if handle is not None:
        handle.remove()
    del model, handle, graph
    _end_work()
    return seen


def _end_work() -> None:
    """Raises the errors of work that a device has not done yet."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
