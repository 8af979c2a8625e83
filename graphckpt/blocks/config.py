"""The policy of one block as the user sets it: checked where it is set, ``None`` where the enclosing block decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, final

from graphckpt.blocks.compiled import check_options
from graphckpt.engine.sampling import parse_determinism_check
from graphckpt.errors import ConfigError, did_you_mean, shown
from graphckpt.rules.base import Rule, parse_rule, rule_classes
from graphckpt.stores.base import parse_offload
from graphckpt.stores.partition import parse_partition
from graphckpt.stores.placement import parse_contiguous, parse_min_elements

FIELDS = (
    "activation_checkpointing", "segments", "tiles", "offload", "partition", "contiguous", "min_elements",
    "determinism_check", "early_stop", "compile", "stage_id",
)  # fmt: skip
"""Every field of a block's config; the docstring of :class:`BlockConfig` describes each."""

PLACEMENT = ("offload", "partition", "contiguous", "min_elements")
"""The fields that say where saved tensors are; each is inherited separately."""

RECOMPUTATION = ("determinism_check", "early_stop")
"""The fields that say how a block is recomputed; likewise."""

INHERITED = (*PLACEMENT, *RECOMPUTATION)
"""The fields that blocks take over from the block around them."""

OTHER_NAMES = {
    "cpu_checkpointing": "offload",
    "partitioned_checkpointing": "partition",
    "partition_activations": "partition",
    "contiguous_checkpointing": "contiguous",
    "contiguous_memory_optimization": "contiguous",
}
"""Names of these fields in OSLO and DeepSpeed."""


@final
class BlockConfig:
    """The policy of one block, as eleven fields. Every field is ``None`` until it is set.

    A field is set as ``block.config.offload = "disk"``, or by :func:`graphckpt.apply`, and checked at once.

    Attributes:
        activation_checkpointing (bool | str | dict | Rule | None): What is saved for backward. ``True`` or ``"full"``:
            the inputs, and the block is recomputed. ``False`` or ``"keep"``: everything, also inside a recomputed
            block. The name of another rule, such as ``"selective"``, a mapping such as ``{"rule": "selective", "save":
            "matmul"}``, or a rule object. ``None``: the block is recomputed only with the block around it.
        segments (int | str | None): Recomputes an ``nn.Sequential`` in so many segments of children, one at a time:
            a positive int, ``"sqrt"`` or ``"log"``. ``None``: not in segments.
        tiles (int | None): Runs the block on so many slices of dim 0 of its input, one at a time. ``None``: on the
            whole input.
        offload (bool | str | Host | Disk | None): Where saved tensors are stored. ``True`` or ``"cpu"``: in host
            memory, for CUDA tensors. ``"disk"`` or ``"disk:/a/folder"``: in a file. ``False``: on their device.
            ``None``: as the block around it; outermost, on their device.
        partition (bool | ProcessGroup | DeviceMesh | Partition | None): The ranks that each store a slice of the saved
            tensors. ``True``: the tensor-parallel mesh of the parameters, or all ranks. ``False``: tensors are not
            partitioned. ``None``: as the block around it; outermost, not partitioned.
        contiguous (bool | None): Whether saved tensors are stored in one slab. ``None``: as the block around it;
            outermost, ``False``.
        min_elements (int | None): Tensors with fewer elements are not offloaded, partitioned or put into the slab.
            ``None``: as the block around it; outermost, 1024.
        determinism_check (str | None): What is compared in a recomputation. ``"none"``: nothing. ``"default"``: shapes
            and dtypes of all saved tensors, and the values of some calls: the first three, and one in 64. ``"values"``:
            the values of every call. ``None``: as the block around it; outermost, what :func:`graphckpt.apply` or
            ``Graph.config`` says.
        early_stop (bool | None): Whether a recomputation ends with the last tensor that backward needs. ``False``: it
            runs forward to its end. ``None``: as the block around it; outermost, ``True``.
            ``torch.utils.checkpoint.set_checkpoint_early_stop`` around a forward replaces it.
        compile (bool | dict | None): Whether ``torch.compile`` compiles the block's forward, inside of its policy, or
            the options to call it with. The option ``activation_memory_budget``, from 0 to 1, is the share that
            is saved of what the compiler would save for backward. ``None`` and ``False``: not compiled.
        stage_id (int | None): The pipeline stage of the block, for ``graphckpt.integrations.pipelining`` and
            ``train.dist.pipeline_parallel_size``. ``None``: the stage of the block before it.

    Raises:
        ConfigError: A field does not exist, or a value is not valid for it. The message names block, field and fix.

    >>> config = BlockConfig("layers.0")
    >>> config.activation_checkpointing, config.offload = True, "disk"
    >>> config
    BlockConfig(activation_checkpointing=True, offload='disk')
    """

    __slots__ = ("_changed", "_module_config", "_rule", "_values", "block")

    def __init__(
        self, block: str = "block", changed: Callable[[], None] | None = None, module_config: Any = None
    ) -> None:
        """Creates the config of a block; a Graph and ``apply`` do.

        Args:
            block: The block's path, for messages.
            changed: Called after a field was set.
            module_config: The ``config`` of the module, as Hugging Face models have one; attributes that this one
                lacks are read and set there.
        """
        # `__setattr__` of the class sets fields of the policy.
        set_slot = object.__setattr__
        set_slot(self, "_module_config", module_config)
        set_slot(self, "block", block)
        set_slot(self, "_values", {})
        set_slot(self, "_rule", None)
        set_slot(self, "_changed", changed)

    def __getattr__(self, field: str) -> Any:
        if field in FIELDS:
            return self._values.get(field)
        if self._module_config is not None and hasattr(self._module_config, field):
            return getattr(self._module_config, field)
        raise AttributeError(f"{self.block}.config has no field {field!r}{did_you_mean(field, FIELDS)} · {_FIX}")

    def __setattr__(self, field: str, value: Any) -> None:
        if field not in FIELDS and self._module_config is not None and hasattr(self._module_config, field):
            setattr(self._module_config, field, value)
        else:
            self.update({field: value})

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *FIELDS})

    def placement(self) -> dict[str, Any]:
        """Returns the fields that say where saved tensors are, as far as they are set."""
        return {name: self._values[name] for name in PLACEMENT if name in self._values}

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """Arguments of ``torch.compile`` for the block; ``None`` if it is not compiled."""
        value = self._values.get("compile")
        return dict(value) if isinstance(value, dict) else {} if value else None

    def fields(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        return dict(self._values)

    def update(self, fields: dict[str, Any]) -> None:
        """Sets several fields at once, or, if one of them is wrong, none."""
        # Fields are checked together, as `tiles` and `segments` exclude each other, and nothing is set before.
        values = {**self._values, **fields}
        rule = _combine(self.block, values)
        object.__setattr__(self, "_values", {k: v for k, v in values.items() if v is not None})
        object.__setattr__(self, "_rule", rule)
        if self._changed is not None:
            self._changed()

    def set_stage(self, stage_id: int | None = None, placement: object = None) -> None:
        """Sets the pipeline stage, as OneFlow's ``set_stage`` does; placements have no meaning here."""
        if placement is not None:
            raise ConfigError(f"{self.block}.set_stage: placement has no meaning in PyTorch · fix: move the module")
        self.update({"stage_id": stage_id})

    @property
    def rule(self) -> Rule | None:
        """The rule that the fields mean together; ``None`` if the enclosing block decides."""
        return self._rule  # type: ignore[no-any-return]

    def describe(self) -> str:
        """Returns the fields that are set, as in a call."""
        return ", ".join(f"{key}={value!r}" for key, value in self._values.items())

    def __repr__(self) -> str:
        return f"BlockConfig({self.describe()})"


_FIX = "fix: use one of " + ", ".join(FIELDS)


def _combine(block: str, values: dict[str, Any]) -> Rule | None:
    for field, value in values.items():
        if field not in FIELDS:
            ours = f" · fix: write {OTHER_NAMES[field]}, which means the same" if field in OTHER_NAMES else None
            raise ConfigError(
                f"{block}.{field}: unknown field{ours or did_you_mean(str(field), FIELDS) + f' · {_FIX}'}"
            )
        if field == "stage_id" and value is not None and not (type(value) is int and value >= 0):
            raise ConfigError(f"{block}.stage_id: expected an int from 0 on, got {shown(value)} · fix: use its number")
        if field == "compile":
            check_options(block, value)
        if field in _PARSERS and value is not None:
            _parsed(block, field, _PARSERS[field], value)
    flag, segments, tiles = (values.get(name) for name in ("activation_checkpointing", "segments", "tiles"))
    rule: Rule | None = _parsed(block, "activation_checkpointing", parse_rule, flag)
    if segments is None and tiles is None:
        return rule
    if segments is not None and tiles is not None:
        raise ConfigError(f"{block}: segments and tiles cannot both cut one block · fix: unset one of them")
    field = "segments" if segments is not None else "tiles"
    if flag not in (None, True):
        raise ConfigError(
            f"{block}.{field}: it needs activation_checkpointing = True or None, which is {flag!r} · fix: unset one"
        )
    slicing: Rule = _parsed(block, field, rule_classes()[field], values[field])
    return slicing


def check_attribute(block: str, origin: object, name: str) -> None:
    """Raises a :class:`ConfigError` if a field is set as an attribute of a module, where it would have no effect."""
    if name != "compile" and hasattr(origin, name):  # torch.compile in place is a method of every module
        return
    names = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, FIELDS, n=1, cutoff=0.9)
    if names:
        raise ConfigError(
            f"{block}.{name}: expected an attribute of {type(origin).__name__}, got a field of its policy · "
            f"fix: write {block}.config.{names[0]}"
        )


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields that a policy sets: a mapping of fields as it is, anything else is a rule.

    >>> fields_of({"offload": True}), fields_of("full"), fields_of({"rule": "tiles", "num_tiles": 2})
    ({'offload': True}, {'activation_checkpointing': 'full'}, \
{'activation_checkpointing': {'rule': 'tiles', 'num_tiles': 2}})
    """
    is_fields = isinstance(value, Mapping) and "rule" not in value
    return dict(value) if is_fields else {"activation_checkpointing": value}


def _parse_early_stop(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"expected a bool or None, got {shown(value)} · fix: use True, False or None")
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "offload": parse_offload,
    "partition": parse_partition,
    "contiguous": parse_contiguous,
    "min_elements": parse_min_elements,
    "determinism_check": parse_determinism_check,
    "early_stop": _parse_early_stop,
}


def _parsed(block: str, field: str, parse: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, type):
        what = f"expected an object, got the class {value.__name__}"
        raise ConfigError(f"{block}.{field}: {what} · fix: {value.__name__}()")
    try:
        return parse(value)
    except ConfigError as error:
        text = str(error).removeprefix(f"{field}: ").replace(repr(value), shown(value))
        raise ConfigError(f"{block}.{field}: {text}") from None
