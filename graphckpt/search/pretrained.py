"""Reads the config of a Transformers model, and builds the model with one training step, without weights or its code.

Only ``config.json`` is read: from a folder, a file, the cache of ``huggingface_hub``, or the hub. Transformers is
imported on first use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import nn
from torch.optim import Optimizer

from graphckpt.blocks.select import layers
from graphckpt.errors import ConfigError, GraphckptError, did_you_mean, first_line
from graphckpt.extras import require
from graphckpt.search.adapters import with_lora
from graphckpt.search.estimate_options import TASKS, EstimateOptions
from graphckpt.search.optimizers import optimizers_for
from graphckpt.simulation.attention_kernels import ATTENTION_NAMES, register_attention
from graphckpt.simulation.losses import fuse_head
from graphckpt.simulation.quantized import quantize

EXTRA: Final = "estimate"
_CONFIG = "config.json"
_SECONDS = 5  # to ask the hub for the file once: `hf_hub_download` tries to reach it for over 20
_SEQ = 2048  # tokens, if neither an option nor the model says otherwise
_IMAGE = 224  # pixels, for configs without a size, such as those of convolutional networks
_IMAGES = "image-classification"
TRACED: Final = 2
"""The most micro-batches that a simulated step runs; more are like the last one."""

_TASKS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "causal-lm": ("CAUSAL_LM", "AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "seq2seq-lm": ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM", ("ForConditionalGeneration",)),
    "masked-lm": ("MASKED_LM", "AutoModelForMaskedLM", ("ForMaskedLM", "ForPreTraining")),
    "sequence-classification": (
        "SEQUENCE_CLASSIFICATION",
        "AutoModelForSequenceClassification",
        ("ForSequenceClassification",),
    ),
    "token-classification": ("TOKEN_CLASSIFICATION", "AutoModelForTokenClassification", ("ForTokenClassification",)),
    "question-answering": ("QUESTION_ANSWERING", "AutoModelForQuestionAnswering", ("ForQuestionAnswering",)),
    _IMAGES: ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification", ("ForImageClassification",)),
}
"""By task: the prefix of Transformers' mapping, its auto class, and endings of architectures."""

assert tuple(_TASKS) == TASKS


@final
@dataclass(frozen=True)
class PretrainedModel:
    """A config of Transformers with the task that its model is trained for."""

    name: str
    config: Any
    task: str
    options: EstimateOptions

    @property
    def architecture(self) -> str:
        """The name of the class of the model."""
        mapped = _mapping(self.task)[type(self.config)]
        classes = mapped if isinstance(mapped, tuple) else (mapped,)
        names: list[str] = [each.__name__ for each in classes]
        return next((name for name in getattr(self.config, "architectures", None) or () if name in names), names[0])

    @property
    def auto_class(self) -> str:
        """The name of the class of Transformers that makes the model of any config for the task."""
        return _TASKS[self.task][1]

    @property
    def has_cache(self) -> bool:
        """Whether the model returns a cache of keys and values by default."""
        return hasattr(self._text_config, "use_cache")

    @property
    def dtype(self) -> torch.dtype:
        value = self.options.dtype or self.config.dtype or "float32"
        dtype = getattr(torch, str(value).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            fix = self.options.setting("dtype", "bfloat16")
            raise ConfigError(f"{self.name}: dtype: expected a type of PyTorch, got {value!r} · fix: {fix}")
        return dtype

    @property
    def seq(self) -> int | None:
        """The tokens of a sample; ``None`` for images."""
        if self.task == _IMAGES:
            return None
        return self.options.seq or min(_SEQ, self._positions or _SEQ)

    @property
    def image_size(self) -> tuple[int, int]:
        size = getattr(self.config, "image_size", None) or _IMAGE
        return (size[0], size[1]) if isinstance(size, (list, tuple)) else (size, size)

    @property
    def has_experts(self) -> bool:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return any((getattr(self._text_config, name, None) or 0) > 1 for name in names)

    @property
    def _text_config(self) -> Any:
        return self.config.get_text_config()

    @property
    def _positions(self) -> int | None:
        positions = getattr(self._text_config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) and positions > 0 else None

    def check(self) -> None:
        """Raises a ConfigError for options that would fail in the step, or have no effect."""
        if self.options.loss != "model" and self.task != "causal-lm":
            what = f"expected 'model' for {self.task}, got {self.options.loss!r}"
            raise ConfigError(f"{self.options.named('loss')}: {what} · fix: {self.options.setting('loss', 'model')}")
        seq, positions = self.options.seq, self._positions
        if self.task == _IMAGES and seq is not None:
            height, width = self.image_size
            what = f"expected nothing for {_IMAGES}, got {seq}"
            fix = f"leave it out; images of the config are {height} x {width}"
            raise ConfigError(f"{self.options.named('seq')}: {what} · fix: {fix}")
        if seq is not None and positions is not None and seq > positions:
            what = f"expected at most the {positions} positions of {self.name}, got {seq}"
            fix = self.options.setting("seq", positions)
            raise ConfigError(f"{self.options.named('seq')}: {what} · fix: {fix}")
        self._check_packed()
        if self.task == "seq2seq-lm" and getattr(self.config, "decoder_start_token_id", None) is None:
            fix = 'add "decoder_start_token_id": 0, or the id of the model\'s first token'
            raise ConfigError(f"{self.name}: expected decoder_start_token_id in its config, got nothing · fix: {fix}")

    def _check_packed(self) -> None:
        packed, name = self.options.packed, self.options.named("packed")
        if packed is None:
            return
        if self.task != "causal-lm":
            raise ConfigError(f"{name}: expected nothing for {self.task}, got {packed} · fix: leave it out")
        assert self.seq is not None
        if self.seq % packed:
            divisor = next(n for n in range(min(packed, self.seq), 0, -1) if self.seq % n == 0)
            what = f"expected a number that divides the {self.seq} tokens of a row, got {packed}"
            raise ConfigError(f"{name}: {what} · fix: {self.options.setting('packed', divisor)}")

    def make(
        self, device_type: str, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[nn.Module, Callable[[], object], list[Optimizer]]:
        """Returns the model, a function that runs one step of training, and its optimizers.

        Args:
            device_type: Of ``torch.autocast``.
            inputs: The arguments of each forward, which the caller may change between steps; by default
                :meth:`inputs`.

        Raises:
            ConfigError: Transformers, PEFT or PyTorch refuses the config or an option.
        """
        model = self._build()
        if self.options.loss != "model":
            fuse_head(model, self.options.loss, self.name)
        if self.options.quantization is not None:
            quantize(model, self.options.quantization)
        if self.options.lora is not None:
            model = with_lora(model, self.options, self.name, EXTRA)
        model.train()
        if self.options.world_size is not None:
            _shard(model, self.options.world_size, self.options.autocast)
        in_backward = self.options.fused_backward
        optimizers = optimizers_for(model, self.options.optimizer, in_backward=in_backward)
        inputs = self.inputs() if inputs is None else inputs
        trained = [one for one in model.parameters() if one.requires_grad]
        # FSDP2 casts weights and inputs itself, by the policy that `_shard` gives it.
        autocast = None if self.options.world_size is not None else self.options.autocast

        dtype = str(self.dtype).removeprefix("torch.")
        scaler = torch.amp.GradScaler(device_type, enabled=self.options.scales_gradients(dtype))

        def step() -> None:
            for _ in range(min(self.options.accumulation, TRACED)):
                with nullcontext() if autocast is None else torch.autocast(device_type, getattr(torch, autocast)):
                    loss = model(**inputs).loss
                    if self.options.accumulation > 1:
                        loss = loss / self.options.accumulation
                scaler.scale(loss).backward()
            if self.options.clip:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if not in_backward:
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()

        return model, step, optimizers

    def _build(self) -> nn.Module:
        import transformers  # noqa: PLC0415

        # As trainers have it: a cache would keep the keys and values of all layers until the output is freed.
        text = self._text_config
        if hasattr(text, "use_cache"):
            text.use_cache = False
        if self.task == "sequence-classification" and getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0  # a batch needs one, and no byte depends on it
        auto = getattr(transformers, self.auto_class)
        settings: dict[str, Any] = {"dtype": self.dtype, "trust_remote_code": False}
        attention = self.options.attention
        if attention is not None:
            settings["attn_implementation"] = ATTENTION_NAMES.get(attention, attention)
        if attention in ATTENTION_NAMES:
            register_attention(self.options.packed)
        try:
            model: nn.Module = auto.from_config(self.config, **settings)
        except GraphckptError:
            raise
        except Exception as error:
            if attention is not None and "attention" in str(error):
                other = "eager" if attention == "sdpa" else "sdpa"
                what = f"{self.architecture} does not have {attention!r}"
                name, fix = self.options.named("attention"), self.options.setting("attention", other)
                raise ConfigError(f"{name}: {what} · fix: {fix}") from error
            what = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"{self.name}: expected a config of {self.architecture}, got {what} · fix: correct it"
            ) from error
        has_kernel = getattr(model, "_supports_flash_attn" if attention == "flash" else "_supports_flex_attn", True)
        if attention in ATTENTION_NAMES and not has_kernel:
            what = f"{self.architecture} does not have {attention!r}"
            name, other = self.options.named("attention"), "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
            raise ConfigError(f"{name}: {what} · fix: {self.options.setting('attention', other)}")
        return model

    def inputs(self) -> dict[str, torch.Tensor]:
        """Returns the arguments of a forward."""
        batch, seq = self.options.batch, self.seq
        if seq is None:
            pixels = torch.zeros(batch, getattr(self.config, "num_channels", 3), *self.image_size, dtype=self.dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        labels = torch.zeros(batch, dtype=torch.long)
        if self.task == "question-answering":
            return {"input_ids": tokens, "start_positions": labels, "end_positions": labels.clone()}
        if self.task == "sequence-classification":
            return {"input_ids": tokens, "labels": labels}
        return {"input_ids": tokens, "labels": tokens.clone()}


def _shard(model: nn.Module, world_size: int, dtype: str | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - takes a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    mesh = init_device_mesh("cuda", (world_size,))
    precision = MixedPrecisionPolicy()
    if dtype is not None:
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    for module in (*map(model.get_submodule, layers(model)), model):
        fully_shard(module, mesh=mesh, mp_policy=precision)


def read_model(name: Any, options: EstimateOptions) -> PretrainedModel:
    """Reads the config of a model.

    Args:
        name: A folder with a ``config.json``, that file, the name of a model on the hub, or a config of Transformers.
        options: The step.

    Raises:
        ConfigError: The model does not exist, it needs code or weights that are not Transformers', or an option does
            not suit it.
    """
    require(EXTRA, "transformers")
    if isinstance(name, (str, os.PathLike)):
        label, values = _read_json(name)
        _check_values(label, values)
        config = _config_of(label, values)
    else:
        label, config = getattr(name, "model_type", type(name).__name__), deepcopy(name)
        if not callable(getattr(name, "get_text_config", None)):
            fix = "estimate('folder_with_config_json', device='h100')"
            raise ConfigError(f"model: expected a name, a path or a config of Transformers, got {name!r} · fix: {fix}")
        _check_values(label, vars(config))
    model = PretrainedModel(label, config, _task_of(label, config, options.task), options)
    model.check()
    return model


def _read_json(name: str | os.PathLike[str]) -> tuple[str, dict[str, Any]]:
    if not str(name).strip():  # which is the present folder as a path
        raise ConfigError(f"model: expected a name or a path, got {name!r} · fix: name a folder, or a model on the hub")
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / _CONFIG
        label = path.parent.resolve().name
        if not path.is_file():
            raise ConfigError(
                f"{name}: expected a folder with a {_CONFIG}, found none · fix: name the folder of a model"
            )
    elif path.is_file():
        label = path.resolve().parent.name if path.name == _CONFIG else path.stem
    else:
        if path.suffix == ".json" or path.is_absolute() or str(name).startswith((".", "~")):
            raise ConfigError(f"{name}: expected a folder or a {_CONFIG}, found neither · fix: check the path")
        label, path = str(name), Path(_cached_config(str(name)))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: expected JSON in {path.name}, got {first_line(error)} · fix: correct it") from None
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise ConfigError(f"{name}: expected a mapping in {path.name}, got a {kind} · fix: name a config.json")
    return label, values


def _cached_config(name: str) -> str:
    """Returns the file of a model's config in the cache, which is downloaded if it is not there."""
    import huggingface_hub as hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    fix = "check the name, or pass a folder or a config.json"
    try:
        return str(hub.hf_hub_download(name, _CONFIG, local_files_only=True))
    except errors.HFValidationError:
        raise ConfigError(f"{name}: expected a folder, a config.json or the name of a model · fix: {fix}") from None
    except errors.LocalEntryNotFoundError:
        pass
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, _CONFIG), timeout=_SECONDS)
        return str(hub.hf_hub_download(name, _CONFIG, etag_timeout=_SECONDS))
    except errors.GatedRepoError:
        page = f"{hub.constants.ENDPOINT}/{name}"
        raise ConfigError(f"{name}: gated · fix: accept its terms on {page}, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(f"{name}: not a folder, and not a public model on the hub · fix: {fix}") from None
    except errors.RemoteEntryNotFoundError:
        raise ConfigError(
            f"{name}: expected a {_CONFIG} on the hub, found none · fix: name a Transformers model"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ConfigError(f"{name}: the hub answered {first_line(error)} · fix: try again, or pass a folder") from error
    except Exception:  # of the network, or that of a hub that is switched off
        what = "not a folder, not in the cache, and the hub cannot be reached"
        raise ConfigError(f"{name}: {what} · fix: {fix}") from None


def _check_values(name: str, values: Mapping[str, Any]) -> None:
    if values.get("auto_map"):
        what = f"{name}: its model is custom code (auto_map), which is never run"
        raise ConfigError(f"{what} · fix: plan it in a script: graphckpt.plan(make_model, device=...)")
    if values.get("quantization_config"):
        settings = values["quantization_config"]
        method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else settings
        what = f"{name}: quantized weights ({method}) cannot be estimated"
        raise ConfigError(f"{what} · fix: remove quantization_config from its config, and set dtype")


def _config_of(name: str, values: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415

    kind = values.get("model_type")
    if kind is None:
        raise ConfigError(f"{name}: expected model_type in its config, got nothing · fix: name a Transformers model")
    if not isinstance(kind, str):
        raise ConfigError(f"{name}: expected a string as model_type, got {kind!r} · fix: name a Transformers model")
    if kind not in CONFIG_MAPPING:
        guess = did_you_mean(str(kind), CONFIG_MAPPING.keys())
        raise ConfigError(f"{name}: unknown model_type {kind!r}{guess} · fix: pip install -U transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        what = "; ".join(lines) or type(error).__name__
        raise ConfigError(f"{name}: expected a config of {kind}, got {what} · fix: correct it") from error


def _mapping(task: str) -> Any:
    import transformers  # noqa: PLC0415

    return getattr(transformers, f"MODEL_FOR_{_TASKS[task][0]}_MAPPING")


def _task_of(name: str, config: Any, wanted: str | None) -> str:
    possible = [task for task in _TASKS if type(config) in _mapping(task)]
    if wanted in possible:
        return wanted
    if wanted is not None:
        fix = (
            f"use {', '.join(possible)}" if possible else "plan it in a script: graphckpt.plan(make_model, device=...)"
        )
        raise ConfigError(f"task: {name} ({config.model_type}) has no {wanted} · fix: {fix}")
    architectures = tuple(getattr(config, "architectures", None) or ())
    for task in possible:
        if any(architecture.endswith(_TASKS[task][2]) for architecture in architectures):
            return task
    if not possible:
        what = f"{name}: no task of graphckpt estimate suits {config.model_type!r}"
        raise ConfigError(f"{what} · fix: plan it in a script: graphckpt.plan(make_model, device=...)")
    return possible[0]


@contextmanager
def step_errors(model: PretrainedModel) -> Iterator[None]:
    """Raises errors of the step as a ConfigError that names the model."""
    try:
        yield
    except GraphckptError:
        raise
    except Exception as error:
        what = f"{model.name}: the step of {model.architecture} cannot be simulated: {type(error).__name__}"
        fix = "other options, or plan it on the device"
        raise ConfigError(f"{what}: {first_line(error)} · fix: {fix}") from error
