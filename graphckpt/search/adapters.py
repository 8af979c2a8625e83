"""LoRA adapters on a Transformers model, by PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from graphckpt.errors import ConfigError
from graphckpt.extras import require
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.finetune_options import ALL_LINEAR, target_modules


def with_lora(model: Any, options: EstimateOptions, name: str, extra: str) -> nn.Module:
    """Returns a model with adapters, which alone are trained.

    Raises:
        ConfigError: PEFT has no default layers for the model, or it has none of the layers that are named.
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reads names that Transformers has deprecated
            adapted: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        linear = ", ".join(sorted({one.rpartition(".")[2] for one in _linear_layers(model)}))
        what = f"{name} has no layers named {targets or names!r}; its linear layers are named {linear}"
        raise ConfigError(f"lora_targets: {what} · fix: lora_targets={ALL_LINEAR!r}") from error
    if options.lora_dtype is not None:
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, options.lora_dtype))
    return adapted


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


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    ]
