"""Settings of a whole Graph, with OneFlow's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from graphckpt.budget import check_budget
from graphckpt.engine.sampling import parse_determinism_check
from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.graph.capture import CHOICES, CaptureBackend
from graphckpt.planning.options import PlanOptions

_WITHOUT_EFFECT = (
    "allow_fuse_add_to_output", "allow_fuse_cast_scale", "allow_fuse_model_update_ops", "enable_compress_memory",
    "enable_choose_best_memory_allocation", "enable_cudnn_conv_heuristic_search_algo", "enable_fused_model_update_cast",
    "enable_multi_tensor_update", "enable_straighten_algorithm", "set_outputs_buffer_size",
)  # fmt: skip
_METHOD_FOR = {
    **dict.fromkeys(("amp", "autocast"), "enable_amp(dtype=torch.bfloat16)"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps", "micro_batches"), "set_gradient_accumulation_steps(4)"
    ),
}
"""Names of these settings elsewhere, and the method that sets them."""
_IMPOSSIBLE = {
    "enable_auto_parallel": "set torch.distributed's parallelism on the module",
    "enable_zero": "use fully_shard or ZeroRedundancyOptimizer",
    "set_zero_redundancy_optimizer_mode": "use fully_shard or ZeroRedundancyOptimizer",
}

_ON_OUT_OF_MEMORY = ("raise", "replan")


@final
class GraphConfig:
    """Settings of a Graph, for all of its calls.

    OneFlow's pure performance knobs (``allow_fuse_*`` and the like) are accepted and do nothing, since PyTorch has
    its own; its parallelism raises with what to use instead.
    """

    training: bool = False
    """True once an optimizer was added."""
    amp_dtype: torch.dtype | None = None
    """Autocast's dtype around ``build``; ``None`` without autocast."""
    num_micro_batches: int = 1
    """Into how many parts a batch is cut; gradients are averaged over them."""
    has_scaler: bool = False
    """Whether a gradient scaler was set."""
    strict_static: bool = False
    """An input of another shape, dtype, device or value than on the first call is an error."""
    measure: bool = True
    """The first calls of a training graph are watched for ``explain()``; later ones cost nothing."""
    capture: Any = "auto"
    """``"auto"`` captures the step as a CUDA graph if its modules are on CUDA, and runs it eagerly, with a
    warning, if it cannot be captured; ``"cuda_graph"`` makes that an error; ``"eager"`` never captures."""
    max_captures: int = 8
    """Captures that are kept, one for each kind of input; the least recently used is released first."""
    memory_budget: Any = None
    """Bytes, ``"12GiB"``, ``"50%"`` of the device's memory, ``0.6`` of the plain step's peak, ``"max"`` or ``"min"``:
    policies are planned for it in the first calls, at most eight, each of which is an update of the training, and again
    for larger inputs. Only ``"min"``, joined layers and the like are planned as :meth:`graphckpt.Graph.plan` does, by
    runs of the step on a copy of its state."""
    plan_options: Any = PlanOptions()
    """The :class:`~graphckpt.planning.PlanOptions` of such plans, or a mapping of its fields."""
    determinism_check: str = "default"
    """Default of ``determinism_check`` for blocks that do not set it: ``"none"``, nothing;
    ``"default"``, shapes and dtypes of all saved tensors, and the values of some calls; ``"values"``, the values of
    every call. Replays of a capture are not checked."""
    on_out_of_memory: str = "raise"
    """``"replan"`` plans again when a step runs out of memory, for the memory that is free, and repeats the step, with
    one warning. Each step then keeps a copy of the buffers."""

    _changed: Callable[[], None] | None = None

    def __init__(self, changed: Callable[[], None] | None = None, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(self, name, value)
        object.__setattr__(self, "_changed", changed)

    def settings(self) -> dict[str, Any]:
        """Returns every field by its name."""
        return {name: getattr(self, name) for name in _FIELDS}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            choices = [*_FIELDS[4:], *dict.fromkeys(_METHOD_FOR.values())]  # the first are set by methods
            fix, hint = f"use {', '.join(choices)}", did_you_mean(name, _FIELDS)
            if name in _METHOD_FOR:
                fix, hint = f"config.{_METHOD_FOR[name]}", ""
            raise ConfigError(f"Graph.config has no field {name!r}{hint} · fix: {fix}")
        if name in ("training", "strict_static", "measure") and not isinstance(value, bool):
            raise ConfigError(f"Graph.config.{name}: expected a bool, got {value!r} · fix: use True or False")
        if name == "capture" and not isinstance(value, CaptureBackend) and value not in CHOICES:
            raise ConfigError(
                f"Graph.config.capture: there is no {value!r}{did_you_mean(str(value), CHOICES)} · "
                f"fix: use one of {', '.join(repr(choice) for choice in CHOICES)}"
            )
        if name == "max_captures" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"Graph.config.max_captures: expected a positive int, got {value!r} · fix: use 8")
        if name == "memory_budget" and value is not None:
            value = check_budget(value)
        if name == "on_out_of_memory" and value not in _ON_OUT_OF_MEMORY:
            hint = did_you_mean(str(value), _ON_OUT_OF_MEMORY)
            raise ConfigError(
                f"Graph.config.{name}: expected 'raise' or 'replan', got {value!r}{hint} · fix: use one of these"
            )
        if name == "determinism_check":
            try:
                parse_determinism_check(value)
            except ConfigError as error:
                raise ConfigError(f"Graph.config.{error}") from None
        if name == "plan_options":
            value = PlanOptions.of(value, "Graph.config.plan_options")
        object.__setattr__(self, name, value)
        if self._changed is not None:
            self._changed()

    def __getattr__(self, name: str) -> Any:
        if name in _WITHOUT_EFFECT:
            return lambda *args, **kwargs: None
        if name in _IMPOSSIBLE:

            def refuse(mode: object = True, *args: object, **kwargs: object) -> None:
                if mode is not False:
                    fix = _IMPOSSIBLE[name]
                    raise ConfigError(f"Graph.config.{name}: a Graph does not do this · fix: {fix}")

            return refuse
        raise AttributeError(f"Graph.config has no attribute {name!r}{did_you_mean(name, dir(type(self)))}")

    def enable_amp(self, mode: bool = True, *, dtype: torch.dtype = torch.float16) -> None:
        """Runs ``build`` under autocast.

        Args:
            mode: ``False`` switches it off.
            dtype: ``torch.float16`` (with :meth:`~graphckpt.Graph.set_grad_scaler`) or ``torch.bfloat16``.

        Raises:
            ConfigError: ``mode`` is not a bool, or ``dtype`` is another one.
        """
        if not isinstance(mode, bool):
            raise ConfigError(f"enable_amp: expected a bool as mode, got {mode!r} · fix: use True or False")
        if dtype not in (torch.float16, torch.bfloat16):
            what = f"expected torch.float16 or torch.bfloat16, got {dtype!r}"
            raise ConfigError(f"enable_amp: {what} · fix: torch.bfloat16")
        self.amp_dtype = dtype if mode else None

    def set_gradient_accumulation_steps(self, value: int) -> None:
        """Cuts each batch on dim 0 into ``value`` micro-batches and steps once with the mean of their gradients.

        ``build`` runs once per micro-batch. Outputs are packed: a loss without dimensions becomes one of shape
        ``[value]``, other tensors are concatenated on dim 0.

        Raises:
            ConfigError: ``value`` is not a positive int.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"set_gradient_accumulation_steps: expected a positive int, got {value!r} · fix: use 4")
        self.num_micro_batches = value

    @property
    def is_plain(self) -> bool:
        """Whether ``build`` runs without changes: once a call, without autocast or scaling."""
        return self.amp_dtype is None and self.num_micro_batches == 1 and not self.has_scaler

    def describe(self) -> str:
        """Returns the settings that are not the default ones, as in a call."""
        settings = [f"training={self.training}"]
        if self.amp_dtype is not None:
            settings.append(f"amp={str(self.amp_dtype).removeprefix('torch.')}")
        if self.num_micro_batches > 1:
            settings.append(f"gradient_accumulation_steps={self.num_micro_batches}")
        if self.capture != "auto":
            settings.append(f"capture={self.capture if isinstance(self.capture, str) else self.capture.name!r}")
        if self.determinism_check != "default":
            settings.append(f"determinism_check={self.determinism_check!r}")
        if self.strict_static:
            settings.append("strict_static=True")
        return ", ".join(settings)

    def __repr__(self) -> str:
        return f"GraphConfig({self.describe()})"


_FIELDS = tuple(name for name in GraphConfig.__annotations__ if name != "_changed")
