"""Runs the matrix: models of four libraries x rules x stores x excluded children x drop-in functions x compilation.

Each case runs two steps under its policy and compares losses, gradients, buffers and the RNG state with those of two
plain steps of the same kind (eager, layers compiled one by one, or the model compiled, by ``aot_eager``), or of the
model's own checkpointing with PyTorch's function, and measures what its forward keeps, by the CPU's allocator. Rows are
written one by one; ``--resume`` goes on where a run has ended.
``--check`` runs a part and fails if a case is worse than in ``results/matrix.csv``, unless a decision record allows it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import fnmatch
import gc
import io
import json
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Event
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of the profiler, which counts bytes
import torch
import torch.utils.checkpoint
from report import RESULTS, header, table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import graphckpt
from graphckpt import Tiles
from graphckpt.errors import GraphckptError

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests")]
from helpers.architectures import ARCHITECTURES  # noqa: E402

MODES = ("eager", "by block", "whole")
COMPILED = {"backend": "aot_eager"}
FAMILIES = (
    *("gpt2", "llama", "mixtral", "bert", "t5", "swin", "resnet"),
    *("torchvision resnet", "timm vit", "diffusers unet", "diffusers dit"),
)
"""Models that differ most; of the others, only `full` in a compiled model runs compiled."""
CLOSE = 1e-5  # of the largest value: rounding, where sums are in another order
RANK = {"equal": 0, "close": 1, "idle": 2, "refused": 3, "error": 4, "differs": 5}
"""Outcomes from best to worst."""
_TORCHS = torch.utils.checkpoint.checkpoint


@dataclass(frozen=True)
class Model:
    name: str
    build: Callable[[], nn.Module]
    """Builds it in train mode, always with the same weights."""
    loss: Callable[[nn.Module], Tensor]
    layers: str
    """A regular expression of the names of its repeated layers."""

    def layer_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_modules() if re.fullmatch(self.layers, name)]


def transformers_models() -> Iterator[Model]:
    for a in ARCHITECTURES:
        pattern = re.escape(a.layers).replace(r"\*", r"[^.]+")
        yield Model(a.name, a.build, lambda m, a=a: a.loss(m(**a.inputs())), pattern)


def _model(name: str, layers: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> Model:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return build().train()

    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(*shape or (2, 3, 32, 32), generator=torch.Generator().manual_seed(1))
        output = model(x, **more)
        return (output if isinstance(output, Tensor) else output.sample).square().mean()

    return Model(name, built, loss, layers)


def torchvision_models() -> Iterator[Model]:
    for op in ("nms", "qnms"):  # wheels for CUDA cannot load their ops on a CPU, and no model here needs one
        torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision.models as tv  # noqa: PLC0415
    from torchvision.models.convnext import CNBlockConfig  # noqa: PLC0415

    vit = {"image_size": 32, "patch_size": 8, "num_layers": 3, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    swin: dict[str, Any] = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    blocks = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    basic = tv.resnet.BasicBlock
    resnet = partial(tv.resnet.ResNet, basic, [2, 2, 1, 1], num_classes=8)
    yield _model("torchvision resnet", r"layer\d\.\d", resnet)
    yield _model("torchvision vit", r"encoder\.layers\.\w+", partial(tv.VisionTransformer, **vit, dropout=0.1))
    swin |= {"window_size": [2, 2], "stochastic_depth_prob": 0.1}
    yield _model("torchvision swin", r"features\.[13]\.\d", partial(tv.SwinTransformer, **swin))
    convnext = partial(tv.ConvNeXt, blocks, stochastic_depth_prob=0.1)
    yield _model("torchvision convnext", r"features\.[13]\.\d", convnext)
    densenet = partial(tv.DenseNet, 8, (2, 2), 16)
    yield _model("torchvision densenet", r"features\.denseblock\d\.denselayer\d", densenet)
    yield _model("torchvision mobilenet", r"features\.\d+", partial(tv.mobilenet_v2, width_mult=0.25))


def timm_models() -> Iterator[Model]:
    import timm  # noqa: PLC0415

    m, size = timm.models, {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": 8}
    vit = partial(m.vision_transformer.VisionTransformer, **size, depth=3, num_heads=4, drop_path_rate=0.1)
    yield _model("timm vit", r"blocks\.\d", vit)
    block, channels = m.resnet.BasicBlock, (8, 16, 32, 64)
    resnet = partial(m.resnet.ResNet, block, [2, 1, 1, 1], channels=channels, drop_path_rate=0.1)
    yield _model("timm resnet", r"layer\d\.\d", resnet)
    yield _model("timm mixer", r"blocks\.\d", partial(m.mlp_mixer.MlpMixer, **size, num_blocks=3, proj_drop_rate=0.1))
    yield _model("timm efficientnet", r"blocks\.\d\.\d", partial(timm.create_model, "efficientnet_lite0"))
    swin = {"patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    yield _model("timm swin", r"layers\.\d\.blocks\.\d", partial(m.swin_transformer.SwinTransformer, **size | swin))


def diffusers_models() -> Iterator[Model]:
    import diffusers as d  # noqa: PLC0415

    wide = {"block_out_channels": (16, 32), "norm_num_groups": 4}
    unet = wide | {"sample_size": 16, "layers_per_block": 1, "dropout": 0.1}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    attention = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 8}
    blocks = r"(down|up)_blocks\.\d|mid_block"
    yield _model("diffusers unet", blocks, partial(d.UNet2DModel, **unet, **attention), 2, 3, 16, 16, timestep=5)
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    cross = {"down_block_types": down, "up_block_types": up, "cross_attention_dim": 16, "attention_head_dim": 4}
    given = {"timestep": 5, "encoder_hidden_states": torch.ones(2, 3, 16)}
    yield _model(
        "diffusers unet, text", blocks, partial(d.UNet2DConditionModel, **unet, **cross), 2, 4, 16, 16, **given
    )
    vae = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    blocks = r"(en|de)coder\.((down|up)_blocks\.\d|mid_block)"
    yield _model("diffusers vae", blocks, partial(d.AutoencoderKL, **wide, **vae), 2, 3, 16, 16)
    dit = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 3, "sample_size": 8}
    dit |= {"num_embeds_ada_norm": 10, "dropout": 0.1}
    given = {"timestep": torch.tensor([3, 4]), "class_labels": torch.tensor([1, 2])}
    yield _model(
        "diffusers dit", r"transformer_blocks\.\d", partial(d.DiTTransformer2DModel, **dit), 2, 4, 8, 8, **given
    )


@cache
def models() -> dict[str, Model]:
    """Returns the models of the libraries that are installed."""
    found: dict[str, Model] = {}
    for library in (transformers_models, torchvision_models, timm_models, diffusers_models):
        with contextlib.suppress(ImportError):
            found |= {model.name: model for model in library()}
    return found


# ---- policies

RULES = ("keep", "full", "selective", "segments", "tiles", "joined")
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload": "cpu"},
    "disk": {"offload": "disk", "min_elements": 1},
    "contiguous": {"contiguous": True, "min_elements": 1},
}
CHILDREN = {  # by the class of the child, or its name
    "norm": r".*norm.*",
    "activation": r".*(gelu|silu|relu|tanh|activation|swish).*|act(_fn)?",
    "attention": r".*(attention|attn).*",
}
PRODUCTS = [f"{rule}, {store}" for rule in RULES for store in STORES]
FUNCTIONS = ("checkpoint", "checkpoint_sequential", "torch.utils.checkpoint replaced")
POLICIES = (*PRODUCTS, *(f"full, without {child}" for child in CHILDREN), *FUNCTIONS)
COMPILED_POLICIES = {
    "by block": ("keep, device", "full, device", "full, disk", "full, contiguous", "joined, device",
                 "full, without norm"),
    "whole": ("keep, device", "full, device", "selective, device", "segments, device", "full, disk", "joined, device",
              "full, without norm", "checkpoint", "checkpoint_sequential"),
}  # fmt: skip


def policies_of(mode: str, model: str) -> tuple[str, ...]:
    if mode == "eager":
        tiled = model != "xlnet"  # whose first dimension is that of the tokens, which attention mixes
        return tuple(policy for policy in POLICIES if tiled or not policy.startswith("tiles"))
    if model in FAMILIES:
        return COMPILED_POLICIES[mode]
    return ("full, device",) if mode == "whole" else ()


@cache
def _called(case: Model) -> set[str]:
    """Returns the names of the modules that a step calls: some models iterate over an ``nn.Sequential``."""
    found: set[str] = set()
    model = case.build()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: found.add(name))  # type: ignore[misc]
    case.loss(model)
    return found


def _sequentials(case: Model, model: nn.Module, layers: list[str]) -> list[str]:
    """Returns the parents of the layers, if every one calls its children in order."""
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in layers))
    runs = [model.get_submodule(name) for name in parents]
    are_run = all(type(m).forward is nn.Sequential.forward and len(m) > 1 for m in runs)
    return parents if are_run and _called(case).issuperset(parents) else []  # type: ignore[arg-type]


def _children(model: nn.Module, layer: str, kind: str) -> list[str]:
    """Returns the topmost modules of a kind in a layer."""
    found: list[str] = []
    for name, module in model.get_submodule(layer).named_modules():
        names = (type(module).__name__.lower(), name.rpartition(".")[2].lower())
        if name and any(re.fullmatch(CHILDREN[kind], each) for each in names):
            found += [name] if not any(name.startswith(f"{outer}.") for outer in found) else []
    return [f"{layer}.{name}" for name in found]


def fields_of(case: Model, policy: str, model: nn.Module, layers: list[str], mode: str) -> dict[str, Any] | None:
    """Returns what to pass to ``apply``; ``None`` if the policy has no place in this model."""
    rule, _, more = policy.partition(", ")
    compiled = {"compile": COMPILED} if mode == "by block" else {}
    blocks = layers
    if rule == "segments":
        blocks = _sequentials(case, model, layers)
        if not blocks or mode == "by block":
            return None
    value = {"keep": False, "full": True, "tiles": Tiles(2), "segments": None}.get(rule, rule)
    fields = {"segments": 2} if rule == "segments" else {"activation_checkpointing": value}
    found: dict[str, Any] = {name: fields | STORES.get(more, {}) | compiled for name in blocks}
    if rule == "joined":
        found[blocks[0]] = found[blocks[0]] | {"activation_checkpointing": True}
    if more.startswith("without "):
        excluded = [child for layer in layers for child in _children(model, layer, more.removeprefix("without "))]
        return found | dict.fromkeys(excluded, False) if excluded else None
    return found


def _set_function(case: Model, policy: str, model: nn.Module, layers: list[str]) -> bool:
    """Has the model call a drop-in function; ``False`` if it has nowhere to."""
    if policy == "checkpoint":
        for layer in map(model.get_submodule, layers):
            layer.forward = partial(graphckpt.checkpoint, layer.forward)
        return True
    if policy == "checkpoint_sequential":
        parents = [model.get_submodule(name) for name in _sequentials(case, model, layers)]
        for parent in parents:
            parent.forward = partial(graphckpt.checkpoint_sequential, list(parent), 2)  # type: ignore[arg-type]
        return bool(parents)
    names = ("gradient_checkpointing_enable", "set_grad_checkpointing", "enable_gradient_checkpointing")
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    try:
        if enable is not None:
            enable()
    except (ValueError, AssertionError):  # of a model that does not support its library's own
        return False
    return enable is not None


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    """Puts ours in place of PyTorch's function, in every module that has imported it."""
    places = [
        module
        for name, module in list(sys.modules.items())
        if not name.startswith("graphckpt") and vars(module).get("checkpoint") is _TORCHS
    ]
    for module in places:
        module.checkpoint = graphckpt.checkpoint  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in places:
            module.checkpoint = _TORCHS  # type: ignore[attr-defined]


# ---- one case


def _steps(model: nn.Module, run: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    found = {}
    for number in range(2):
        loss = loss_of(run)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    found["RNG state"] = torch.get_rng_state()
    found |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def _kept(run: nn.Module, loss_of: Callable[[nn.Module], Tensor], handle: Any = None) -> int:
    """Returns the bytes that a forward takes and keeps for backward, once its files are written."""
    gc.collect()
    files, may_write = _files_of(handle), Event()
    for file in files:
        file._threads["write"].submit(may_write.wait)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
            loss = loss_of(run)
            # The profiler does not see what other threads free: this one frees what they have written.
            writes = [(tensor.write, tensor.data) for file in files for tensor in file._unwritten]
            may_write.set()
            wait([write for write, _ in writes if write is not None])
            del writes
    finally:
        may_write.set()
    taken = sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    loss.backward()
    return int(taken)


def _files_of(handle: Any) -> list[Any]:
    """Returns the open files of the stores of a policy's blocks."""
    stores = [wrapper.context.store for wrapper in handle._wrappers] if handle is not None else []
    places = [place for store in stores for place in getattr(store, "_open_stores", list)()]
    return list({id(place): place._file for place in places if getattr(place, "_file", None) is not None}.values())


def _compare(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> tuple[str, float]:
    if ours.keys() != plain.keys():
        return "differs", float("inf")
    largest = 0.0
    scales: dict[str, float] = defaultdict(float)  # of all gradients together: some would be zero but for rounding
    for name, value in plain.items():
        kind = name.partition(" ")[0]
        scales[kind] = max(scales[kind], value.double().abs().max().item() if value.numel() else 0.0)
    for name, value in plain.items():
        if not torch.equal(ours[name], value):
            scale = scales[name.partition(" ")[0]] or 1.0
            largest = max(largest, (ours[name].double() - value.double()).abs().max().item() / scale)
            largest = largest or float("nan")  # of other shapes, or NaN itself
    return ("equal" if largest == 0 else "close" if largest <= CLOSE else "differs"), largest


def run_case(case: Model, mode: str, policy: str, plain: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the row of a case; ``None`` if the policy has no place in the model. ``plain`` is its plain step's."""
    if mode != "eager":
        torch._dynamo.reset()
    model = case.build()
    if policy.startswith("tiles"):
        model.eval()  # random ops draw by slice
        for part in model.modules():  # a cache cannot be updated by slice
            if hasattr(getattr(part, "config", None), "use_cache"):
                part.config.use_cache = False  # type: ignore[union-attr]
    layers = case.layer_names(model)
    row: dict[str, Any] = {"model": case.name, "mode": mode, "policy": policy}
    notes: list[str] = []
    references = [plain["found"]] if plain else []
    with contextlib.ExitStack() as stack:
        try:
            handle = None
            if policy in FUNCTIONS:
                if policy == FUNCTIONS[-1]:
                    # The model's own checkpointing switches its cache off, and may so reach other kernels: the bits
                    # are those of the same step with PyTorch's function, or, where that one updates the statistics of
                    # norms twice, those of the plain step.
                    peer = case.build()
                    if not _set_function(case, policy, peer, layers):
                        return None
                    runs_peer = torch.compile(peer, **COMPILED) if mode == "whole" else peer  # type: ignore[call-overload]
                    references.append(_steps(peer, runs_peer, case.loss))
                    stack.enter_context(_replaced())
                if not _set_function(case, policy, model, layers):
                    return None
            else:
                fields = fields_of(case, policy, model, layers, mode)
                if fields is None:
                    return None
                handle = stack.enter_context(graphckpt.apply(model, fields)) if plain else None
                if handle is None and mode == "by block":
                    stack.enter_context(graphckpt.apply(model, {name: {"compile": COMPILED} for name in layers}))
            run = torch.compile(model, **COMPILED) if mode == "whole" else model  # type: ignore[call-overload]
            found = _steps(model, run, case.loss)
            if not plain:
                return {"found": found, "kept": _kept(run, case.loss)}
            outcomes = [_compare(found, reference) for reference in references]
            row["outcome"], row["difference"] = min(outcomes, key=lambda outcome: RANK[outcome[0]])
            if policy.startswith("tiles") and row["outcome"] == "equal":  # by chance, or on this machine
                row["outcome"] = "close"
            for wrapper in handle._wrappers if handle is not None else ():
                notes += wrapper.context.notes
            notes += handle._watcher._policies.idle.values() if handle is not None else ()
            row |= {"kept": _kept(run, case.loss, handle), "plain": plain["kept"]}
        except GraphckptError as error:
            row |= {"outcome": "refused", "text": _general(str(error))}
        except Exception as error:
            row |= {"outcome": "error", "text": _general(f"{type(error).__name__}: {error}")}
    if notes:
        row["text"] = "; ".join(dict.fromkeys(_general(note) for note in notes))
    # A policy that saves nothing and says nothing: `keep` on the device is meant to.
    acts = policy == "keep, device" or bool(notes) or mode != "eager"
    if row["outcome"] in ("equal", "close") and not acts and row["kept"] >= row["plain"]:
        row["outcome"] = "idle"
    return row


def _general(text: str) -> str:
    """Returns the first line of a text without what differs from case to case."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)*", "N", lines[0] if lines else "")[:160]


def run_all(cases: list[tuple[str, str, str]], on_row: Callable[[dict[str, Any]], None], limit_s: int) -> None:
    """Runs cases in order; each model's cases of a mode stand together, and share the plain step."""
    known = models()
    last: tuple[str, str, bool] | None = None
    plain: Any = None

    def on_alarm(*_: object) -> None:
        raise TimeoutError(f"the case took more than {limit_s} s")

    signal.signal(signal.SIGALRM, on_alarm)
    for name, mode, policy in cases:
        signal.alarm(limit_s)
        started = time.perf_counter()
        try:
            kind = (name, mode, policy.startswith("tiles"))
            if kind != last:
                last, plain = kind, None
                plain = run_case(known[name], mode, policy if kind[2] else "keep, device", {})
                gc.collect()
                gc.freeze()  # the libraries' own objects: each collection would take 0.3 s
            if plain is not None and "found" in plain:
                row = run_case(known[name], mode, policy, plain)
            else:
                row = {"model": name, "mode": mode, "policy": policy, "outcome": "plain", **(plain or {})}
        except TimeoutError as error:
            row = {"model": name, "mode": mode, "policy": policy, "outcome": "error", "text": str(error)}
        finally:
            signal.alarm(0)
        if row is not None:
            row["seconds"] = round(time.perf_counter() - started, 2)
            on_row(row)


# ---- results

COLUMNS = ("model", "mode", "policy", "outcome", "difference", "kept", "plain", "text")


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the rows, with a legend of texts at the top, as many of them share one."""
    texts = list(dict.fromkeys(row["text"] for row in rows if row.get("text")))
    with path.open("w", newline="") as file:
        file.writelines(f"#{number} {text}\n" for number, text in enumerate(texts))
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            difference = f"{row['difference']:.1e}" if row.get("difference") else ""
            text = f"#{texts.index(row['text'])}" if row.get("text") else ""
            shown = {**row, "difference": difference, "text": text}
            writer.writerow([shown.get(column, "") for column in COLUMNS])


def read_csv(path: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {(row["model"], row["mode"], row["policy"]): row for row in csv.DictReader(io.StringIO("\n".join(lines)))}


def allowed_by_decisions() -> list[str]:
    """Returns the patterns of cases that decision records allow to be worse: ``matrix: <model>/<mode>/<policy>``."""
    texts = [path.read_text() for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    return [pattern for text in texts for pattern in re.findall(r"`matrix: ([^`]+/[^`]+/[^`]+)`", text)]


def worse(rows: list[dict[str, Any]], before: dict[tuple[str, str, str], dict[str, str]]) -> list[str]:
    """Names cases that were right or noted, and are an error or differ now, unless a decision record allows them."""
    allowed, faults = allowed_by_decisions(), []
    for row in rows:
        key = (row["model"], row["mode"], row["policy"])
        then = before.get(key, {}).get("outcome", "equal")
        if RANK.get(row["outcome"], 9) <= RANK.get(then, 9) or any(fnmatch.fnmatch("/".join(key), a) for a in allowed):
            continue
        faults.append(
            f"{'/'.join(key)}: {then}, now {row['outcome']} {row.get('difference') or ''} {row.get('text', '')}"
        )
    return faults


def thin_cases() -> list[tuple[str, str, str]]:
    """Returns the part that runs in 3 minutes on a core: Transformers alone, which every environment of tests has."""
    eager = [
        (name, "eager", policy) for name in ("gpt2", "bert", "t5", "mixtral", "mamba", "resnet") for policy in POLICIES
    ]
    whole = [("gpt2", "whole", policy) for policy in COMPILED_POLICIES["whole"]]
    return eager + [("gpt2", "by block", policy) for policy in COMPILED_POLICIES["by block"]] + whole


def summary(rows: list[dict[str, Any]]) -> str:
    """Returns the table of outcomes by policy, and every case that is not right."""
    libraries = ("torchvision", "timm", "diffusers")

    def cell(chosen: list[dict[str, Any]]) -> str:
        counts = Counter(row["outcome"] for row in chosen)
        return ", ".join(f"{counts[name]} {name}" for name in (*RANK, "plain") if counts[name])

    def saved(chosen: list[dict[str, Any]]) -> str:
        shares = sorted(row["kept"] / row["plain"] for row in chosen if row.get("plain"))
        return f"{shares[len(shares) // 2]:.2f}" if shares else ""

    lines = []
    for policy in POLICIES:
        of_policy = [row for row in rows if row["policy"] == policy]
        by_mode = [[row for row in of_policy if row["mode"] == mode] for mode in MODES]
        lines.append([policy, *map(cell, by_mode), saved(by_mode[0]), saved(by_mode[2])])
    parts = [table(["policy", *MODES, "kept, eager", "kept, whole"], lines)]
    lines = []
    for library in ("transformers", *libraries):
        of_library = [
            row for row in rows if (row["model"].split()[0] if " " in row["model"] else "transformers") == library
        ]
        lines.append([library, *(cell([row for row in of_library if row["mode"] == mode]) for mode in MODES)])
    parts += [
        "",
        table(["library", *MODES], lines),
        "",
        "Cases that are not equal or close, and what policies say:",
        "",
    ]
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        text = row.get("text", "")
        if row["outcome"] not in ("equal", "close") or text:
            groups[row["outcome"], text].append(f"{row['model']}/{row['mode']}/{row['policy']}")
    for (outcome, text), names in sorted(groups.items(), key=lambda item: (-RANK.get(item[0][0], 3), item[0])):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        parts.append(f"- {outcome}: {text or 'without a word'}: {', '.join(names[:3])}{more}")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="*", help="a pattern of models' names")
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--policies", default="*", help="a pattern of policies")
    parser.add_argument("--limit", type=int, default=120, help="seconds for one case")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that build/matrix.jsonl has")
    parser.add_argument("--summary", action="store_true", help="run nothing: write the results from build/matrix.jsonl")
    parser.add_argument("--check", action="store_true", help="run a part of it, and compare with results/matrix.csv")
    options = parser.parse_args()
    quiet()
    if options.check:
        rows: list[dict[str, Any]] = []
        run_all(thin_cases(), rows.append, options.limit)
        faults = worse(rows, read_csv(RESULTS / "matrix.csv"))
        print("\n".join([*faults, f"{len(rows)} cases, {len(faults)} of them worse than results/matrix.csv"]))
        return int(bool(faults))
    path = ROOT / "build" / "matrix.jsonl"
    path.parent.mkdir(exist_ok=True)
    if not (options.resume or options.summary):
        path.unlink(missing_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {(row["model"], row["mode"], row["policy"]) for row in rows}
    cases = [
        (name, mode, policy)
        for mode in options.modes
        for name in ([] if options.summary else sorted(models(), key=lambda name: name not in FAMILIES))
        if fnmatch.fnmatch(name, options.models)
        for policy in policies_of(mode, name)
        if fnmatch.fnmatch(policy, options.policies) and (name, mode, policy) not in known
    ]
    with path.open("a") as file:

        def write(row: dict[str, Any]) -> None:
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["outcome"] not in ("equal", "close"):
                print(
                    *(row.get(name, "") for name in ("model", "mode", "policy", "outcome", "difference", "text")),
                    sep=" | ",
                )

        run_all(cases, write, options.limit)
    order = [*models()]
    rows.sort(key=lambda row: (order.index(row["model"]), MODES.index(row["mode"]), POLICIES.index(row["policy"])))
    if not options.summary and (options.models, options.policies, tuple(options.modes)) != ("*", "*", MODES):
        print(summary(rows))
        return 0
    write_csv(rows, RESULTS / "matrix.csv")
    head = header()
    versions = ", ".join(f"{name} {number}" for name, number in (head["versions"] | library_versions()).items())
    legend = (
        "equal: every bit of losses, gradients, buffers and RNG state after two steps; close: to 1e-5 of the largest "
        "value; idle: it saved nothing, and did not say so; kept: bytes after forward, as a share of the plain step's "
        "(median over models), without files and slabs, which stand since the first step. Which cases run in "
        "which mode: `policies_of` in `benchmarks/matrix.py`."
    )
    text = f"# matrix\n\n- command: `{head['command']}`\n- versions: {versions}\n\n{legend}\n\n{summary(rows)}\n"
    (RESULTS / "matrix.md").write_text(text)
    return 0


def library_versions() -> dict[str, str]:
    return {name: sys.modules[name].__version__ for name in ("torchvision", "timm", "diffusers") if name in sys.modules}


def quiet() -> None:
    """Silences libraries: a case says what it has to say in its row."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
