"""A random programme as data: a tree of modules with policies, and steps. Each of them is one expression of Python."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

import graphckpt
from fuzz import choices, containers, layers
from fuzz.bench import DEVICE
from fuzz.shapes import SHAPES

NAMES: dict[str, Any] = {
    **vars(layers), **vars(containers), **vars(choices),
    "Disk": graphckpt.Disk, "Host": graphckpt.Host, "Segments": graphckpt.Segments, "Selective": graphckpt.Selective,
    "Tiles": graphckpt.Tiles,
}  # fmt: skip
"""What the expressions of a programme may name."""

LAYERS: dict[str, tuple[str, ...]] = {
    "Linear": ("", "'weight'", "'bias'", "'weight bias'"),
    "Norm": ("'batch'", "'batch, average'", "'batch, read'", "'instance'", "'group'", "'layer'", "'rms'"),
    "Activation": (
        "'GELU'", "'Tanh'", "'RReLU'", "'RReLU', inplace=True", "'ReLU', inplace=True", "'SiLU', inplace=True",
        "'ELU', inplace=True", "'LeakyReLU', inplace=True", "'Hardtanh', inplace=True",
    ),
    "Dropout": ("", "inplace=True", "'AlphaDropout'", "'FeatureAlphaDropout'"),
    "HostNoise": (
        "'python'", "'numpy'", "'own python'", "'own numpy'", "'object'", "'partial'", "'held tensor'",
    ),
    "Late": ("'norm'", "'buffer'", "'list'", "'number'"),
    "Begins": tuple(f"{what!r}, {first}" for what in layers.BEGINNINGS for first in (1, 6, 8, 12)),
    "Recurrent": ("'GRU'", "'LSTM'", "'RNN'", "'GRU', keeps_state=True", "'LSTM', keeps_state=True"),
    "Attention": ("", "weights=True", "same=False"),
    "Parametrized": ("'spectral'", "'spectral, by hook'", "'weight'", "'orthogonal'"),
    "EditsItsInput": ("'mul'", "'add'", "'relu'", "'rows'", "'view'", "'detached'", "'noise'"),
    "EditsChildsOutput": ("'add'", "'relu'", "'twice'", "'part'", "'after'"),
    "SharesMemory": ("'positional'", "'list'", "'keyword'", "'nested'", "'detached'"),
    "Codebook": ("", "later=True"),
    "OwnFunction": ("", "inplace=True"),
    "ManyOutputs": ("", "edits=True"),
} | dict.fromkeys(
    (
        "FrozenStatistics", "ScaledDotProduct", "Bilinear", "Convolution", "Lookup", "EditsItsInputLater",
        "EditsBuffer", "UsesContainers", "Counts", "MovesLater", "LowRank", "Tied", "Noise", "Indexing", "HooksInside",
        "Detaches", "ChangesType",
    ),
    ("",),
)  # fmt: skip
"""The arguments that each kind of layer is made with."""
if DEVICE.type == "cuda":
    del LAYERS["Recurrent"]  # whose fused cells have no kernels on the simulated device

CONTAINERS: dict[str, tuple[str, ...]] = {
    "Chain": ("", "", ""),
    "Residual": ("", "how='edits'", "how='edits copy'"),
    "Autocasted": ("", "enabled=False"),
    "DropIn": ("", "how='closure'", "how='sequence'"),
} | dict.fromkeys(
    (
        "Listed", "Twice", "Gate", "WithoutGradients", "Catches", "Retries", "Caches", "Hooked", "Disables",
        "TiesWeights",
    ),
    ("",),
)  # fmt: skip

RULES = [
    "True", "True", "True", "False", "False", "False", "'joined'", "'joined'", "'selective'",
    "Selective('matmul')", "Selective('attention')", "Tiles(1)",
    "Selective(['aten.native_dropout.default', 'aten.sin.default', 'aten.mul.Tensor'])",
    "Selective(['aten.addmm.default[0]', 'aten.tanh.default[0]', 'aten.mul.Tensor[1]'])",
    "Selective(['matmul[1]', 'aten.sum.default'])", "Selective(['aten.clone.default', 'aten.view.default'])",
    *(f"Selective({name})" for name in vars(choices) if name.startswith("keeps_")),
]  # fmt: skip
SEGMENTS = ("Segments('sqrt')", "Segments('log')", "Segments(1)")

STORES = (
    {"contiguous": "True"}, {"offload": "'disk'"}, {"offload": "Disk(in_flight_bytes=500)", "contiguous": "True"},
    {"offload": "Host()"}, {"offload": "Host(in_flight_bytes=300)"},
    {"offload": "False", "contiguous": "False"},
)  # fmt: skip

Fields: TypeAlias = tuple[tuple[str, str], ...]
"""Names and expressions of the fields of a policy."""


@dataclass(frozen=True)
class Node:
    """A module: the call that makes it, what is in it, and the policies of it (``""``) and of modules inside of it."""

    kind: str
    arguments: str = ""
    children: tuple[Node, ...] = ()
    policies: tuple[tuple[str, Fields], ...] = ()

    def expression(self) -> str:
        arguments = ", ".join([*(child.expression() for child in self.children), *filter(None, [self.arguments])])
        return f"{self.kind}({arguments})"

    def rules(self, path: str) -> dict[str, Fields]:
        """Returns the policies by the names of their modules, if this one is called ``path``."""
        inner = path if self.kind == "Chain" or not path else f"{path}.inner"
        inner = f"{path}.inner.inner" if self.kind in ("Caches", "Retries") else inner
        found = {f"{path}.{name}".strip("."): fields for name, fields in self.policies}
        for number, child in enumerate(self.children):
            found |= child.rules(f"{inner}.{number}".strip("."))
        return found


@dataclass(frozen=True)
class Step:
    """The name of a step shape, and how it is run."""

    shape: str
    autocast: bool = False
    needs_grad: bool = True

    def options(self) -> dict[str, bool]:
        """Returns what is not as usual."""
        usual = {"autocast": False, "needs_grad": True}
        return {name: getattr(self, name) for name in usual if getattr(self, name) is not usual[name]}


@dataclass(frozen=True)
class Programme:
    """A model, its policies and its steps."""

    root: Node
    steps: tuple[Step, ...]

    def rules(self) -> dict[str, Fields]:
        return self.root.rules("")

    def size(self) -> int:
        """Returns the number of parts that could be left out."""
        return len(nodes(self.root)) + len(self.steps) + sum(map(len, self.rules().values()))


def nodes(root: Node) -> list[Node]:
    return [root, *(below for child in root.children for below in nodes(child))]


@functools.cache
def parts_of(kind: str, arguments: str) -> tuple[str, ...]:
    """Returns the names of the modules inside of a layer."""
    module: nn.Module = eval(f"{kind}({arguments})", NAMES)
    containers = nn.ModuleDict, nn.ModuleList  # on which a policy has no effect, an error
    return tuple(name for name, part in module.named_modules() if name and not isinstance(part, containers))


def generate(seed: int) -> Programme:
    generator = _Generator(random.Random(seed))
    programme = generator.programme()
    while DEVICE.type == "cuda" and is_left_out(programme):
        programme = generator.programme()
    return programme


def is_left_out(programme: Programme) -> bool:
    """Whether nothing can be said about a programme, as its plain step is not determined.

    Hooks that copy get the noise of `rrelu` before it is drawn.
    """
    return "RReLU" in programme.root.expression() and any(step.shape == "saved_as_copies" for step in programme.steps)


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rate = rng.choice([0.15, 0.3, 0.5])
        self._store_rate = rng.choice([0.0, 0.0, 0.3, 0.6])
        favourites = rng.sample(sorted(LAYERS), 6)
        self._kinds = [*favourites, *favourites, *sorted(LAYERS)]

    def programme(self) -> Programme:
        rng = self._rng
        body = [self._node(depth=0) for _ in range(rng.randint(1, 4))]
        root = Node("Chain", "", (Node("Linear"), *body, Node("Linear")), self._policies((), is_chain=True))
        if not root.rules(""):
            root = Node("Chain", "", root.children, (("", (("activation_checkpointing", "True"),)),))
        # A call that begins something late comes after those that the value check compares in any case.
        is_long = any(node.kind == "Begins" for node in nodes(root))
        shapes = rng.choices(sorted(SHAPES), k=rng.randint(7, 9) if is_long else rng.randint(2, 3))
        autocast = rng.random() < 0.25
        return Programme(root, tuple(Step(shape, autocast, rng.random() < 0.8) for shape in shapes))

    def _node(self, depth: int) -> Node:
        rng = self._rng
        if depth < 3 and rng.random() < (0.55, 0.4, 0.25)[depth]:
            kind = rng.choice(["Chain", "Residual", *sorted(CONTAINERS)])
            arguments = rng.choice(CONTAINERS[kind])
            children = tuple(self._node(depth + 1) for _ in range(rng.randint(1, 3)))
            if kind == "Chain":
                return Node(kind, arguments, children, self._policies((), is_chain=True))
            chains = () if kind in ("Listed", "Caches", "Retries") else ("inner",)
            parts = () if kind == "Listed" else ("inner",)  # an nn.ModuleList, on which a policy has no effect
            return Node(kind, arguments, children, self._policies(parts, chains=chains))
        kind = rng.choice(self._kinds)
        arguments = rng.choice(LAYERS[kind])
        return Node(kind, arguments, (), self._policies(parts_of(kind, arguments)))

    def _policies(
        self, parts: tuple[str, ...], *, is_chain: bool = False, chains: tuple[str, ...] = ()
    ) -> tuple[tuple[str, Fields], ...]:
        chosen = [name for name in ("", *parts) if self._rng.random() < (self._rate / 2 if name else self._rate)]
        found = [(name, self._fields(is_chain=is_chain if not name else name in chains)) for name in chosen]
        return tuple((name, fields) for name, fields in found if fields)

    def _fields(self, *, is_chain: bool) -> Fields:
        rng = self._rng
        fields: dict[str, str] = {}
        if rng.random() < 0.85:
            rules = [*RULES, *SEGMENTS, *SEGMENTS, *SEGMENTS] if is_chain else RULES
            fields["activation_checkpointing"] = rng.choice(rules)
        if rng.random() < self._store_rate:
            fields |= rng.choice(STORES)
            fields["min_elements"] = rng.choice(["1", "1", "1", "30"])
        return tuple(fields.items())
