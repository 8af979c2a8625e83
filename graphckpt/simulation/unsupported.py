"""Refuses what a step on fake tensors cannot run, with an error that says what it is, where, and the way out."""

from __future__ import annotations

import sys
from traceback import walk_tb
from typing import Any

import torch

from graphckpt._compat_compiler import compiler_callback
from graphckpt.errors import ConfigError, GraphckptError
from graphckpt.simulation.stand_ins import StandIns, copy_of, place_of, user_line

_COMPILED = (
    "a compiled function cannot be simulated, since the compiler chooses what it saves · fix: leave torch.compile out; "
    "or, for a function that is not the model, torch.compiler.set_stance('force_eager') before: it runs as without"
)
_FAKE = "register what it returns, by torch.library.register_fake, or plan on the device"
_FLEX = (
    "scaled_dot_product_attention(..., is_causal=True) in its place for the plan: it saves the same tensors, and takes "
    "the time of a causal mask"
)
_DEVICE = "leave it out where torch.cuda.is_available() is False, or plan on the device"
_STREAMS = (
    "offload='cpu' of a plan or a policy in place of copies on a stream, or torch.autograd.graph.save_on_cpu, which "
    "are simulated; or plan on the device"
)
# Messages of PyTorch for what fake tensors, or a process without a GPU, cannot do.
_REASONS = (
    ("Cannot access data pointer", "reads the memory of a tensor, as kernels in Triton, C++ and CUDA do", _FAKE),
    ("data pointer of FakeTensor", "reads the memory of a tensor, as kernels in Triton, C++ and CUDA do", _FAKE),
    ("fake impl", "calls an op without a fake implementation", _FAKE),
    ("Torch not compiled with CUDA enabled", "calls torch.cuda without a GPU", _DEVICE),
    ("Found no NVIDIA driver", "calls torch.cuda without a GPU", _DEVICE),
    ("No CUDA GPUs are available", "calls torch.cuda without a GPU", _DEVICE),
    ("dummy base class", "calls torch.cuda for a stream or an event without a GPU", _STREAMS),
    ("requires CUDA support", "calls torch.cuda for a stream or an event without a GPU", _STREAMS),
    ("'NoneType' object has no attribute 'type'", "asks which accelerator there is without a GPU", _STREAMS),
    ("shape_env must not be None", "has nested tensors, whose sizes are values", "pad them for the plan"),
    ("does not support backward on CPU", "calls flex_attention, which has no kernel without the device", _FLEX),
    ("Triton", "calls a kernel in Triton", _FAKE),
    ("triton", "calls a kernel in Triton", _FAKE),
)


def refuse_unsupported(stand_ins: StandIns) -> None:
    """Refuses compiled functions where they are called, until the end of ``stand_ins``."""
    compile_, is_refused = copy_of(torch.compile), False

    def refuse_calls() -> None:
        nonlocal is_refused
        if is_refused:
            return
        is_refused = True
        original = compiler_callback()
        callback_of = copy_of(original)

        def refuse(callback: Any) -> Any:
            chosen = callback_of(callback)
            if chosen in (None, False):  # `torch.compiler.disable`, or a stance without compiling
                return chosen
            raise ConfigError(f"the step ({user_line()}): {_COMPILED}")

        stand_ins.replace(original, refuse)

    # All compiled functions are called through one function of Dynamo, also those that were compiled before. It is
    # replaced only once Dynamo is there: to import it takes seconds.
    if "torch._dynamo.eval_frame" in sys.modules:
        refuse_calls()

    def compile_and_refuse_calls(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_(*args, **kwargs)
        refuse_calls()
        return compiled

    stand_ins.replace(torch.compile, compile_and_refuse_calls)


def explained(error: BaseException) -> ConfigError | None:
    """Returns the error that says what a step cannot do on fake tensors; ``None`` for an error of the step itself."""
    if isinstance(error, GraphckptError) or not isinstance(
        error, (RuntimeError, AssertionError, ValueError, AttributeError)
    ):
        return None
    text = str(error)
    for part, what, fix in _REASONS:
        if part in text:
            frames = [*walk_tb(error.__traceback__)]
            first = text.partition("\n")[0][:160]
            return ConfigError(f"the step ({place_of(reversed(frames))}) {what} ({first}) · fix: {fix}")
    return None
