"""Lines of Python that set up the training of an estimate: for PyTorch, Transformers, TRL and Lightning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from graphckpt.errors import ConfigError, did_you_mean
from graphckpt.extras import LazyPackage
from graphckpt.search.estimate_options import EstimateOptions
from graphckpt.search.finetune_options import target_modules

if TYPE_CHECKING:
    import yaml
else:
    yaml = LazyPackage("yaml", "estimate")

TRAINERS = ("torch", "transformers", "trl", "lightning")
_RECOMPUTED = ({"activation_checkpointing": True}, {"activation_checkpointing": "full"})
_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("torch.optim.AdamW", {}),
    "adamw-fused": ("torch.optim.AdamW", {"fused": True}),
    "adam": ("torch.optim.Adam", {}),
    "sgd": ("torch.optim.SGD", {}),
    "sgd-momentum": ("torch.optim.SGD", {"momentum": 0.9}),
    "adafactor": ("torch.optim.Adafactor", {}),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", {}),
    "paged-adamw-8bit": ("bitsandbytes.optim.PagedAdamW8bit", {}),
    "paged-adamw-32bit": ("bitsandbytes.optim.PagedAdamW32bit", {}),
    "torchao-adamw-8bit": ("torchao.optim.AdamW8bit", {}),
    "torchao-adamw-4bit": ("torchao.optim.AdamW4bit", {}),
    "adamw-offload": ("torchao.optim.CPUOffloadOptimizer", {}),
}
"""By option: the class, and its arguments besides the parameters and those of :data:`_OF_ARGUMENTS`."""
_OF_ARGUMENTS: Mapping[str, str] = {
    "lr": "arguments.learning_rate",
    "betas": "(arguments.adam_beta1, arguments.adam_beta2)",
    "eps": "arguments.adam_epsilon",
    "weight_decay": "arguments.weight_decay",
}
"""What an optimizer takes from ``TrainingArguments``, which a ``Trainer`` gives to its own optimizers alone."""
_WITHOUT_BETAS = ("torch.optim.SGD", "torch.optim.Adafactor")
"""Classes without the arguments of Adam: ``eps`` of Adafactor is another one."""
_OPTIM = {"adamw": "adamw_torch", "adamw-fused": "adamw_torch_fused", "sgd": "sgd"}
"""The values of ``optim`` of ``TrainingArguments`` that mean the same; any other optimizer is passed as its class."""
_MIXED = {"bfloat16": "bf16", "float16": "fp16"}


@final
@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The training of an estimate, as far as a program has to say it."""

    options: EstimateOptions
    model: str | None
    """The name or the folder of the model; ``None`` for one that was estimated from a config object."""
    auto_class: str
    """The class of Transformers that loads it, such as ``"AutoModelForCausalLM"``."""
    task: str
    seq: int | None
    dtype: str
    """The type of the weights."""
    has_cache: bool
    """Whether the model returns a cache of keys and values by default."""
    layers: tuple[str, ...]
    """The names of its layers."""
    layer_classes: tuple[str, ...]


def apply_line(policies: Mapping[str, Mapping[str, Any]], layers: Sequence[str]) -> str:
    """Returns the call of :func:`graphckpt.apply` that sets the policies; a comment if everything is kept.

    >>> apply_line({f"h.{n}": {"activation_checkpointing": True} for n in range(4)}, ["h.0", "h.1", "h.2", "h.3"])
    'graphckpt.apply(model, True)'
    """
    if not policies:
        return "# everything is kept: no policies to set"
    return f"graphckpt.apply(model, {True if recomputes_all(policies, layers) else policies_text(policies, layers)})"


def recomputes_all(policies: Mapping[str, Mapping[str, Any]], layers: Sequence[str]) -> bool:
    return set(policies) == set(layers) and all(dict(fields) in _RECOMPUTED for fields in policies.values())


def policies_text(
    blocks: Mapping[str, Mapping[str, Any]], layers: Sequence[str] = (), *, prefix_of_all: str = ""
) -> str:
    """Returns policies as Python: a pattern for each list whose layers have one policy, a comprehension for each run.

    Args:
        blocks: The fields by the name of the block.
        layers: The names of all layers.
        prefix_of_all: What the names begin with in the module that gets the policies.

    >>> policies_text({f"layers.{n}": {"activation_checkpointing": True} for n in range(4)} | {"head": {}})
    "{**{f'layers.{n}': {'activation_checkpointing': True} for n in range(4)}, 'head': {}}"
    >>> policies_text({f"h.{n}": {"activation_checkpointing": "selective"} for n in range(2)}, ["h.0", "h.1"])
    "{'h.*': {'activation_checkpointing': 'selective'}}"
    """
    sizes: dict[str, int] = {}
    for name in layers:
        sizes[name.rpartition(".")[0]] = sizes.get(name.rpartition(".")[0], 0) + 1
    numbered = [(re.fullmatch(r"(.*\.)(\d+)", name), name, dict(fields)) for name, fields in blocks.items()]
    # Of h.0 to h.3 with one policy, and h.4 with another: the runs ("h.", 0, four members) and ("h.", 4, one member). A
    # pattern "h.*" would mean h.5 as well, if there is one: so it stands for a whole list alone.
    runs: list[tuple[str, int, list[tuple[str, int]], dict[str, Any]]] = []
    for match, name, fields in numbered:
        prefix, number = (match[1], int(match[2])) if match is not None else (name, -1)
        if runs and runs[-1][3] == fields and (prefix, number) == (runs[-1][0], runs[-1][2][-1][1] + 1):
            runs[-1][2].append((name, number))
        else:
            runs.append((prefix, number, [(name, number)], fields))
    texts = []
    for prefix, first, members, fields in runs:
        place = prefix_of_all + prefix
        if first == 0 and len(members) == sizes.get(prefix[:-1]):
            texts.append(f"{place + '*'!r}: {fields}")
        elif len(members) == 1:
            texts.append(f"{prefix_of_all + members[0][0]!r}: {fields}")
        else:
            ends = f"{first}, {first + len(members)}" if first else f"{len(members)}"
            texts.append(f"**{{f{place + '{n}'!r}: {fields} for n in range({ends})}}")
    return f"{{{', '.join(texts)}}}"


def save_policies(policies: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Writes policies to a YAML file, for :func:`graphckpt.apply`."""
    text = yaml.safe_dump({name: dict(fields) for name, fields in policies.items()}, sort_keys=False)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{path}: cannot be written: {why} · fix: name a file in an existing folder") from None


def check_policy_file(path: str | Path) -> None:
    """Raises a ConfigError for a file that :func:`graphckpt.apply` would not read, and for one without a folder."""
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        fix = f"{file.parent / (file.stem or 'plan')}.yaml"
        raise ConfigError(f"save: expected a file that ends in .yaml, got {path} · fix: {fix}")
    if not file.parent.is_dir():
        why = f"{file.parent} is not a folder"
        raise ConfigError(f"{path}: cannot be written: {why} · fix: name a file in an existing folder")


def check_trainer(trainer: str, options: EstimateOptions, task: str | None = None) -> None:
    """Raises a ConfigError for a trainer without lines, and for a training that it has none for.

    Args:
        trainer: What to check.
        options: The training.
        task: That of the model; ``None`` before its config is read.
    """
    if trainer not in TRAINERS:
        guess = did_you_mean(trainer, TRAINERS)
        what = f"expected {', '.join(TRAINERS[:-1])} or {TRAINERS[-1]}, got {trainer!r}{guess}"
        raise ConfigError(f"--for: {what} · fix: --for transformers")
    for_trainer = f"--for {trainer}"
    if options.optimizer not in _OPTIMIZERS:
        what = f"{options.setting('optimizer', options.optimizer)} has no lines of a trainer"
        raise ConfigError(f"{for_trainer}: {what} · fix: {options.setting('optimizer', 'adamw-8bit')}")
    if options.fused_backward:
        name = options.named("fused_backward")
        raise ConfigError(f"{for_trainer}: {name} has no lines of a trainer · fix: leave {name} out")
    if options.packed is not None and trainer != "trl":
        raise ConfigError(f"{for_trainer}: {options.named('packed')} has no lines of {trainer} · fix: --for trl")
    if options.loss == "tiles":
        what = f"{options.setting('loss', options.loss)} has no lines of a trainer"
        raise ConfigError(f"{for_trainer}: {what} · fix: graphckpt train with task.loss_head=True, or apply Tiles")
    with_loss = {"trl": "trl", "liger": "transformers"}.get(options.loss, trainer)
    if with_loss != trainer:
        what = f"{options.setting('loss', options.loss)} has no lines of {trainer}"
        raise ConfigError(f"{for_trainer}: {what} · fix: --for {with_loss}")
    if trainer == "trl" and task not in ("causal-lm", None):
        raise ConfigError(f"--for trl: expected a causal-lm, got {task} · fix: --for transformers")
    if trainer == "lightning" and options.world_size is not None:
        raise ConfigError("--for lightning: expected one process, got --world-size · fix: --for torch")


def trainer_lines(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]], trainer: str) -> str:
    """Returns the lines of Python for a trainer. They use ``dataset``, which the reader has.

    Args:
        setup: The training.
        policies: The fields of each block.
        trainer: One of :data:`TRAINERS`.

    Raises:
        ConfigError: It is another one, or cannot train this model.
    """
    check_trainer(trainer, setup.options, setup.task)
    if setup.options.quantization is not None and setup.model is None:
        raise ConfigError(f"--for {trainer}: quantized weights are those of a model · fix: name the model")
    lines = {"torch": _torch, "transformers": _transformers, "trl": _trl, "lightning": _lightning}[trainer]
    return "\n".join(lines(setup, policies))


def _torch(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    options, is_sharded = setup.options, setup.options.world_size is not None
    yield from _launch(setup)
    yield "import torch"
    yield from _import_optimizer(setup)
    if is_sharded:
        yield "from torch.distributed.device_mesh import init_device_mesh"
        yield "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    yield f"from transformers import {_class_names(setup)}"
    yield from _import_peft(setup)
    yield from ("", "import graphckpt", "")
    yield from _model(setup)
    # Quantized weights are loaded to the device.
    yield "model.train()" if is_sharded or options.quantization is not None else "model.to('cuda').train()"
    if is_sharded:  # which moves each module to the device before it shards it
        precision = ""
        if options.autocast is not None:
            precision = f"param_dtype=torch.{options.autocast}, reduce_dtype=torch.float32"
        lists = dict.fromkeys(name.rpartition(".")[0] for name in setup.layers)
        modules = " + ".join(f"list(model.get_submodule({name!r}))" for name in lists)
        yield f"mesh = init_device_mesh('cuda', ({options.world_size},))"
        yield f"for module in {modules} + [model]:"
        yield f"    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy({precision}))"
    yield apply_line(policies, setup.layers)
    yield from _optimizer(setup, "optimizer =", "model")
    if is_scaled := options.scales_gradients(setup.dtype):
        yield "scaler = torch.amp.GradScaler('cuda')"
    sampler = ""
    if is_sharded:  # without one, each rank would read the same samples
        yield "sampler = torch.utils.data.DistributedSampler(dataset, shuffle=False)"
        sampler = ", sampler=sampler"
    yield f"loader = torch.utils.data.DataLoader(dataset, batch_size={options.batch}{sampler}{_of_tokens(setup)}"
    is_plain = options.accumulation == 1
    yield "for batch in loader:" if is_plain else "for number, batch in enumerate(loader, 1):"
    yield "    batch = {name: value.to('cuda') for name, value in batch.items()}"
    if options.autocast is None or is_sharded:
        yield "    loss = model(**batch).loss"
    else:
        yield f"    with torch.autocast('cuda', dtype=torch.{options.autocast}):"
        yield "        loss = model(**batch).loss"
    loss = "loss" if is_plain else f"(loss / {options.accumulation})"
    yield f"    {f'scaler.scale({loss})' if is_scaled else loss}.backward()"
    if not is_plain:
        yield f"    if number % {options.accumulation}:"
        yield "        continue"
    if options.clip:
        if is_scaled:
            yield "    scaler.unscale_(optimizer)"
        yield "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    yield from ("    scaler.step(optimizer)", "    scaler.update()") if is_scaled else ("    optimizer.step()",)
    yield "    optimizer.zero_grad()"


def _transformers(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield from _launch(setup)
    yield from _imports(setup)
    yield f"from transformers import {_class_names(setup, 'Trainer', 'TrainingArguments')}"
    yield from _import_peft(setup)
    yield ""
    yield from _import_callback(policies)
    yield from _model(setup)
    yield "arguments = TrainingArguments("
    yield from _arguments(setup)
    yield ")"
    yield "trainer = Trainer("
    yield "    model=model,"
    yield "    args=arguments,"
    yield "    train_dataset=dataset," + (f"  # samples of {setup.seq} tokens" if setup.seq else "")
    yield from _trainer_arguments(setup, policies)
    yield ")"
    yield "trainer.train()"


def _trl(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield from _launch(setup)
    yield from _imports(setup)
    yield f"from transformers import {_class_names(setup)}"
    yield from _import_peft(setup, "LoraConfig")
    yield "from trl import SFTConfig, SFTTrainer"
    yield ""
    yield from _import_callback(policies)
    yield from _model(setup, adds_lora=False)
    yield "arguments = SFTConfig("
    yield from _arguments(setup)
    yield f"    max_length={setup.seq},"
    if setup.options.packed is not None:
        yield "    packing=True,"
    yield "    gradient_checkpointing=False,  # graphckpt recomputes; TRL's default is True"
    yield ")"
    if setup.options.loss != "trl":
        yield "# SFTTrainer computes the loss in chunks, which takes less memory than the model's own loss here"
    yield "trainer = SFTTrainer("
    yield "    model=model,"
    yield "    args=arguments,"
    yield "    train_dataset=dataset,"
    if setup.options.lora is not None:
        yield f"    peft_config={_lora_config(setup)},"
    yield from _trainer_arguments(setup, policies)
    yield ")"
    yield "trainer.train()"


def _lightning(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    options = setup.options
    yield "import torch"
    yield from _import_optimizer(setup)
    yield "from lightning.pytorch import LightningModule, Trainer"
    yield f"from transformers import {_class_names(setup)}"
    yield from _import_peft(setup)
    yield ""
    if policies:
        yield "from graphckpt.integrations.lightning import GraphckptCallback"
        yield ""
    yield from _model(setup)
    yield ""
    yield ""
    yield "class Training(LightningModule):"
    yield "    def __init__(self, model):"
    yield "        super().__init__()"
    yield "        self.model = model.train()"
    yield ""
    yield "    def training_step(self, batch, index):"
    yield "        return self.model(**batch).loss"
    yield ""
    yield "    def configure_optimizers(self):"
    yield from _optimizer(setup, "        return", "self")
    yield ""
    yield ""
    pure = {"float32": "32-true", "bfloat16": "bf16-true", "float16": "16-true"}
    mixed = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}
    precision = pure[setup.dtype] if options.autocast is None else mixed[options.autocast]
    yield f"loader = torch.utils.data.DataLoader(dataset, batch_size={options.batch}{_of_tokens(setup)}"
    settings = f"devices=1, precision={precision!r}, accumulate_grad_batches={options.accumulation}"
    settings += ", gradient_clip_val=1.0" if options.clip else ""
    yield f"trainer = Trainer({settings}{_callback(setup, policies)})"
    yield "trainer.fit(Training(model), loader)"


def _launch(setup: TrainingSetup) -> Iterator[str]:
    if setup.options.world_size is not None:
        yield f"# start it on {setup.options.world_size} GPUs: torchrun --nproc-per-node gpu train.py"


def _callback(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> str:
    if not policies:
        return ""
    if recomputes_all(policies, setup.layers):
        return ", callbacks=[GraphckptCallback('full')]"
    # Names of a LightningModule begin with that of its attribute.
    text = policies_text(policies, setup.layers, prefix_of_all="model.")
    return f", callbacks=[GraphckptCallback(None, policies={text})]"


def _of_tokens(setup: TrainingSetup) -> str:
    return ")" if setup.seq is None else f")  # samples of {setup.seq} tokens"


def _import_peft(setup: TrainingSetup, names: str = "LoraConfig, get_peft_model") -> Iterator[str]:
    if setup.options.lora is not None:
        yield f"from peft import {names}"


def _import_callback(policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if policies:
        yield "from graphckpt.integrations.transformers import GraphckptCallback"
        yield ""


def _lora_config(setup: TrainingSetup) -> str:
    options = setup.options
    settings: dict[str, Any] = {"r": options.lora}
    if options.lora_targets is not None:
        settings["target_modules"] = target_modules(options.lora_targets)
    for name, value in (("lora_dropout", options.lora_dropout), ("use_dora", options.dora)):
        settings |= {name: value} if value else {}
    settings |= {"use_rslora": True} if options.rslora else {}
    return f"LoraConfig({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _quantization(setup: TrainingSetup) -> str:
    """Returns the argument of ``from_pretrained`` that quantizes the weights; nothing without."""
    kind = setup.options.quantization
    if kind is None:
        return ""
    settings: dict[str, Any] = {"load_in_8bit": True}
    if kind != "int8":
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": setup.dtype}
        settings |= {"bnb_4bit_use_double_quant": True} if kind == "nf4-double" else {}
    text = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f", quantization_config=BitsAndBytesConfig({text}), device_map={{'': 0}}"


def _import_optimizer(setup: TrainingSetup) -> Iterator[str]:
    """Yields the import of the package of the optimizer, if it is not PyTorch."""
    module = _OPTIMIZERS[setup.options.optimizer][0].rpartition(".")[0]
    if not module.startswith("torch."):
        yield f"import {module}"


def _optimizer(setup: TrainingSetup, begin: str, model: str) -> Iterator[str]:
    """Yields the statement that makes the optimizer. Its learning rate is Transformers' default, to be changed."""
    name, arguments = _OPTIMIZERS[setup.options.optimizer]
    indent = " " * (len(begin) - len(begin.lstrip()))
    yield f"{begin} {name}("
    yield f"{indent}    [p for p in {model}.parameters() if p.requires_grad],"
    yield f"{indent}    lr=5e-5,  # yours"
    for key, value in arguments.items():
        yield f"{indent}    {key}={value!r},"
    yield f"{indent})"


def _imports(setup: TrainingSetup) -> Iterator[str]:
    """Yields the imports for an optimizer that is passed as its class, and for the types of adapters."""
    name = _OPTIMIZERS[setup.options.optimizer][0]
    is_class = setup.options.optimizer not in _OPTIM
    if (is_class and name.startswith("torch.")) or setup.options.lora_dtype is not None:
        yield "import torch"
    if is_class:
        yield from _import_optimizer(setup)


def _class_names(setup: TrainingSetup, *others: str) -> str:
    config = ("BitsAndBytesConfig",) if setup.options.quantization is not None else ()
    return ", ".join((setup.auto_class, *config, *others))


def _model(setup: TrainingSetup, *, adds_lora: bool = True) -> Iterator[str]:
    attention = setup.options.attention
    name = {"flash": "flash_attention_2", "flex": "flex_attention"}.get(attention or "", attention)
    settings = f"dtype={setup.dtype!r}" + ("" if attention is None else f", attn_implementation={name!r}")
    if setup.model is None:
        yield f"model = {setup.auto_class}.from_config(config, {settings})"
    else:
        yield f"model = {setup.auto_class}.from_pretrained({setup.model!r}, {settings}{_quantization(setup)})"
    if setup.has_cache:
        yield "model.config.get_text_config().use_cache = False"
    if adds_lora and setup.options.lora is not None:
        yield f"model = get_peft_model(model, {_lora_config(setup)})"
        if setup.options.lora_dtype is not None:
            yield "for parameter in model.parameters():"
            yield "    if parameter.requires_grad:"
            yield f"        parameter.data = parameter.data.to(torch.{setup.options.lora_dtype})"


def _arguments(setup: TrainingSetup) -> Iterator[str]:
    options = setup.options
    yield "    output_dir='output',"
    yield f"    per_device_train_batch_size={options.batch},"
    yield f"    gradient_accumulation_steps={options.accumulation},"
    if options.optimizer in _OPTIM:
        yield f"    optim={_OPTIM[options.optimizer]!r},"
    for dtype, name in _MIXED.items():
        yield f"    {name}={options.autocast == dtype},"
    yield f"    max_grad_norm={'1.0,' if options.clip else '0.0,  # the estimate is without clipping'}"
    if options.loss == "liger":
        yield "    use_liger_kernel=True,  # which fuses other layers too"
    if options.world_size is not None:
        classes = list(setup.layer_classes)
        yield "    fsdp=True,"
        yield f"    fsdp_config={{'version': 2, 'transformer_layer_cls_to_wrap': {classes}}},"


def _trainer_arguments(setup: TrainingSetup, policies: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    if setup.options.optimizer not in _OPTIM:
        name, arguments = _OPTIMIZERS[setup.options.optimizer]
        names = ("lr", "weight_decay") if name in _WITHOUT_BETAS else tuple(_OF_ARGUMENTS)
        yield "    optimizer_cls_and_kwargs=("
        yield f"        {name},"
        yield "        {"
        for key in names:
            yield f"            {key!r}: {_OF_ARGUMENTS[key]},"
        for key, value in arguments.items():
            yield f"            {key!r}: {value!r},"
        yield "        },"
        yield "    ),"
    if recomputes_all(policies, setup.layers):
        yield "    callbacks=[GraphckptCallback('full')],"
    elif policies:
        yield f"    callbacks=[GraphckptCallback(None, policies={policies_text(policies, setup.layers)})],"
