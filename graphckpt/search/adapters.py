"""LoRA adapters on a Transformers model, by PEFT."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.finetune_options import ALL_LINEAR, target_modules
from graphckpt.simulation.quantized import Nf4Linear, QuantizedLinear


def with_lora(model: Any, options: EstimateOptions, name: str, extra: str) -> nn.Module:
    """Returns a model with adapters, which alone are trained.

    Raises:
        ConfigError: PEFT has no default layers for the model, the model does not have a layer that is named, or PEFT
            adapts parameters rather than layers.
        MissingPackageError: PEFT is not installed; ``extra`` has it.
    """
    require(extra, "peft")
    import peft  # noqa: PLC0415

    assert options.lora is not None
    targets = options.lora_targets
    names: Any
    if targets is None:
        # By name, as PEFT 0.21 does not find its own defaults in models whose experts Transformers 5 has fused.
        kind = model.config.model_type
        names = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(kind)
        if names is None:
            fix = f"lora_targets={ALL_LINEAR!r}, or the names of layers"
            raise ConfigError(f"lora: {name}: PEFT has no default layers for {kind!r} · fix: {fix}")
    else:
        names = target_modules(targets)
    config = peft.LoraConfig(
        r=options.lora,
        target_modules=names,
        lora_dropout=options.lora_dropout,
        use_dora=options.dora,
        use_rslora=options.rslora,
    )
    linear = _linear_layers(model)  # PEFT replaces them
    parameters = [parameter for parameter, _ in model.named_parameters()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reads names that Transformers has deprecated
            adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        _check_parameters(config.target_parameters or (), parameters, linear, options, name)
        raise _not_found(targets or str(names), linear, options, name) from error
    _check_parameters(config.target_parameters or (), parameters, linear, options, name)
    if targets is not None and isinstance(names, list):
        layers = [f".{layer.removesuffix('.lora_A')}" for layer, _ in adapted.named_modules() if "lora_A" in layer]
        missing = [one for one in names if not any(layer.endswith(f".{one}") for layer in layers)]
        if missing:  # PEFT ignores them if it finds another one
            raise _not_found(",".join(missing), linear, options, name)
    if options.quantization is not None:
        _adapt_quantized(adapted, is_autocast=options.autocast is not None)
    if options.lora_dtype is not None:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, options.lora_dtype))
    return adapted


def _adapt_quantized(adapted: nn.Module, *, is_autocast: bool) -> None:
    """Gives adapters of quantized layers the forward that PEFT defines for them where bitsandbytes is installed."""
    from peft.tuners.lora import Linear  # noqa: PLC0415

    class QuantizedAdapter(Linear):
        """``peft.tuners.lora.Linear4bit`` and ``Linear8bitLt`` with one adapter: they leave types to autocast."""

        def forward(self: Any, x: torch.Tensor) -> Any:
            result = self.base_layer(x)
            if isinstance(self.base_layer, Nf4Linear):
                result = result.clone()  # as PEFT does
            dtype, (name,) = result.dtype, self.active_adapters
            if not is_autocast:
                x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
            if name in self.lora_variant:
                result = self.lora_variant[name].forward(self, active_adapter=name, x=x, result=result)
                return result if is_autocast else result.to(dtype)
            output = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x))) * self.scaling[name]
            return result + (output if is_autocast else output.to(dtype))

    for module in adapted.modules():
        if isinstance(getattr(module, "base_layer", None), QuantizedLinear):
            module.__class__ = QuantizedAdapter


def lora_phrase(model: nn.Module, options: EstimateOptions) -> str:
    """Returns the line of the assumptions on the adapters of a model, with the names of the layers that have them."""
    adapted = [name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")]
    names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
    chosen = "" if options.lora_targets else ", which PEFT chooses by default"
    kinds = [kind for kind, is_on in (("DoRA", options.dora), ("rank-stabilized", options.rslora)) if is_on]
    if options.lora_dropout:
        kinds.append(f"dropout {options.lora_dropout:g}")
    kind = "".join(f", {each}" for each in kinds)
    types = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    return f"LoRA of rank {options.lora}{kind} on {len(adapted)} layers ({names}{chosen}), in {' and '.join(types)}"


def _not_found(targets: str, linear: Sequence[str], options: EstimateOptions, name: str) -> ConfigError:
    names = ", ".join(sorted({layer.rpartition(".")[2] for layer in linear}))
    what = f"{name} has no layers named {targets!r}; its linear layers are named {names}"
    return ConfigError(f"{options.named('lora_targets')}: {what} · fix: {options.setting('lora_targets', ALL_LINEAR)}")


def _check_parameters(
    targets: Iterable[str], parameters: Sequence[str], linear: Sequence[str], options: EstimateOptions, name: str
) -> None:
    """Raises a ConfigError for adapters of parameters, which PEFT replaces in each forward, so it cannot run again.

    PEFT adapts those of the experts and the router of a model where Transformers 5 has no linear layers for them. The
    fix names the linear layers in the other parts of a layer of the model: PEFT takes the names of those in the same
    part, as of shared experts, for the names of the parameters too.
    """
    ends = tuple(f".{target}" for target in targets)
    adapted = [parameter for parameter in parameters if parameter.endswith(ends)]
    if not adapted:
        return
    parts = {_part(parameter) for parameter in adapted}
    layers = dict.fromkeys(layer.rpartition(".")[2] for layer in linear if _part(layer) not in parts)
    names = ", ".join(sorted(target.removesuffix(".weight") for target in targets))
    what = f"{options.lora_targets!r} has adapters on parameters of experts or routers of {name} ({names})"
    why = "PEFT replaces these in each forward, which is not simulated"
    fix = options.setting("lora_targets", ",".join(layers))
    raise ConfigError(f"{options.named('lora_targets')}: {what}; {why} · fix: {fix}")


def _part(name: str) -> str:
    """Returns the part of a layer of the model that has a module or a parameter, such as ``"self_attn"``."""
    # Of "model.layers.3.mlp.experts.gate_up_proj" it is "mlp", of "lm_head" the whole name.
    match = re.search(r"\.\d+\.([^.]+)", name)
    return name if match is None else match[1]


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    ]
