"""The shapes of the steps of random programmes. Each is a function of a :class:`Bench`."""

from __future__ import annotations

import copy
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fuzz.bench import Bench


class Failure(Exception):
    """What a step raises in its own middle."""


def loss_of(y: Tensor) -> Tensor:
    return y.pow(2).mean() + y.sum() * 0.1


def plain(bench: Bench) -> None:
    loss_of(bench.call(bench.input())).backward()


def other_batch(bench: Bench) -> None:
    loss_of(bench.call(bench.input(6))).backward()


def two_losses(bench: Bench) -> None:
    y = bench.call(bench.input())
    y.sin().sum().backward(retain_graph=True)
    loss_of(y).backward()


def two_losses_of_two_calls(bench: Bench) -> None:
    first, second = bench.call(bench.input()), bench.call(bench.input())
    first.sum().backward()
    loss_of(second).backward()


def retained(bench: Bench) -> None:
    loss = loss_of(bench.call(bench.input()))
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(bench: Bench) -> None:
    for _ in range(3):
        loss_of(bench.call(bench.input())).backward()


def penalty(bench: Bench) -> None:
    x = bench.input().requires_grad_()
    y = bench.call(x)
    (slope,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True, allow_unused=True)
    loss = loss_of(y)
    (loss if slope is None else loss + slope.pow(2).sum()).backward()


def curvature(bench: Bench) -> None:
    y = bench.call(bench.input())
    wanted = [p for p in bench.model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss_of(y), wanted, create_graph=True, allow_unused=True)
    total = sum((s.pow(2).sum() for s in slopes if s is not None and s.requires_grad), y.sum() * 0)
    total.backward()


def no_grad_between(bench: Bench) -> None:
    loss = loss_of(bench.call(bench.input()))
    with torch.no_grad():
        bench.call(bench.input())
    loss.backward()


def eval_between(bench: Bench, mode: Any = torch.no_grad) -> None:
    loss = loss_of(bench.call(bench.input()))
    bench.model.eval()
    with mode():
        bench.call(bench.input(3).detach() if mode is torch.inference_mode else bench.input(3))
    bench.model.train()
    loss.backward()


def inference_between(bench: Bench) -> None:
    eval_between(bench, torch.inference_mode)


def eval_step(bench: Bench) -> None:
    bench.model.eval()
    loss_of(bench.call(bench.input())).backward()
    bench.model.train()


def several_forwards(bench: Bench) -> None:
    losses = [loss_of(bench.call(bench.input(batch))) for batch in (4, 3, 4)]
    (losses[2] + losses[0] * losses[1]).backward()


def reversed_backwards(bench: Bench) -> None:
    losses = [loss_of(bench.call(bench.input())) for _ in range(2)]
    losses[0].backward()
    losses[1].backward()


def chained_calls(bench: Bench) -> None:
    y = bench.call(bench.input())
    loss_of(bench.call(y.sin())).backward()


def subset(bench: Bench) -> None:
    x = bench.input().requires_grad_()
    y = bench.call(x)
    wanted = [p for p in bench.model.parameters() if p.requires_grad][1::2]
    for number, grad in enumerate(torch.autograd.grad(y.sum(), [x, *wanted], retain_graph=True, allow_unused=True)):
        bench.see(f"part {number}", grad)
    loss_of(y).backward()


def inputs_only(bench: Bench) -> None:
    x = bench.input().requires_grad_()
    loss_of(bench.call(x)).backward(inputs=[x])


def part_of_output(bench: Bench) -> None:
    y = bench.call(bench.input())
    y.exp()  # is not used
    y[:, 0].sum().backward()


def dropped_forward(bench: Bench) -> None:
    bench.call(bench.input())
    loss_of(bench.call(bench.input())).backward()


def fail(*_: Any) -> None:
    raise Failure


def fails_in_forward(bench: Bench) -> None:
    modules = list(bench.model.modules())
    hook = modules[bench.draw(len(modules))].register_forward_pre_hook(fail)
    try:
        loss_of(bench.call(bench.input())).backward()
    except Failure:
        bench.see("failure", True)
    hook.remove()
    loss_of(bench.call(bench.input())).backward()


def fails_in_backward(bench: Bench) -> None:
    modules = list(bench.model.modules())

    def on_output(_module: Any, _args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(fail)

    hook = modules[bench.draw(len(modules))].register_forward_hook(on_output)
    loss = loss_of(bench.call(bench.input()))
    hook.remove()
    try:
        loss.backward()
    except Failure:
        bench.see("failure", True)
    del loss
    loss_of(bench.call(bench.input())).backward()


def removed_between(bench: Bench) -> None:
    loss = loss_of(bench.call(bench.input()))
    if bench.handle is not None:
        bench.handle.remove()
    loss.backward()


def copied_model(bench: Bench) -> None:
    twin = copy.deepcopy(bench.model)
    loss_of(twin(bench.input()).float()).backward()
    for name, parameter in twin.named_parameters():
        bench.see(f"gradient of copied {name}", parameter.grad)
    loss_of(bench.call(bench.input())).backward()


def loaded_state(bench: Bench) -> None:
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    loss_of(bench.call(bench.input())).backward()
    bench.model.load_state_dict(state)


def other_parameters(bench: Bench) -> None:
    other = {name: (p.detach() * 1.5).requires_grad_(p.requires_grad) for name, p in bench.model.named_parameters()}
    y = torch.func.functional_call(bench.model, other, (bench.input(),), tie_weights=True)
    loss_of(y.float()).backward()
    for name, parameter in other.items():
        bench.see(f"gradient of other {name}", parameter.grad)


def freezes(bench: Bench) -> None:
    """The stem is frozen for one call: what reaches the blocks needs no gradient."""
    stem = next(iter(bench.model.children()))
    stem.requires_grad_(False)
    loss_of(bench.call(bench.input().detach())).backward()
    stem.requires_grad_(True)
    loss_of(bench.call(bench.input())).backward()


def in_a_thread(bench: Bench) -> None:
    loss = loss_of(bench.call(bench.input()))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


def edited_input(bench: Bench) -> None:
    """Edits what was computed from the output, and the input after backward."""
    x = bench.input()
    y = bench.call(x)
    y = y * 1
    y.mul_(2)
    loss_of(y).backward()
    x.detach().add_(1)


def saved_as_copies(bench: Bench) -> None:
    # save_on_cpu copies tensors of a device alone: on the CPU, an edit after it would make the plain step wrong
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied):
        loss = loss_of(bench.call(bench.input()))
    loss.backward()


SHAPES = {
    name: shape for name, shape in list(vars().items()) if inspect.isfunction(shape) and shape not in (loss_of, fail)
}
