"""Ways to set every rule, alone, nested and with holes, that the contracts of rules and stores are checked on."""

from __future__ import annotations

from typing import Any

from torch import nn

import graphckpt
from graphckpt.rules import Segments, Selective, Tiles

# One way to put each rule on the chain's blocks 1..3; "" is the whole chain, an nn.Sequential.
ON_CHAIN: dict[str, dict[str, Any]] = {
    "keep": {"*": False},
    "full": {"[123]": True},
    "selective": {"[123]": Selective("matmul")},
    "segments": {"": Segments("sqrt")},
    "tiles": {"[123]": Tiles(1)},
    "joined": {"1": True, "[23]": "joined"},
}
NESTED: dict[str, dict[str, Any]] = {
    f"{outer} around {inner}": {"": value} | {k: v for k, v in ON_CHAIN[inner].items() if k}
    for outer, value in {
        "full": True,
        "selective": Selective("matmul"),
        "selective, random ops kept": Selective(
            ["aten.native_dropout.default", "aten.rand_like.default", "aten.addmm.default"]
        ),
        "segments sqrt": Segments("sqrt"),
        "segments log": Segments("log"),
        "one tile": Tiles(1),
    }.items()
    for inner in ON_CHAIN
    if inner not in ("segments", "joined")
}
NESTED |= {
    "results by number": {"[123]": Selective(["aten.addmm.default[0]", "aten.tanh.default[0]", "aten.mul.Tensor[1]"])},
    "results by number around full": {"[123]": Selective(["aten.addmm.default[1]"]), "re:[123]\\.(act|a|first)": True},
}
HOLES: dict[str, dict[str, Any]] = {
    "every second child kept": {"[123]": True, "re:[123]\\.[a-z]*[aeiou]": False},
    "a child kept in nested blocks": {
        "": True,
        "[123]": Selective("matmul"),
        "re:[123]\\.(drop|norm|act|a|first|rnn)": False,
    },
    "one block kept": {"": True, "2": False},
    "a child kept in joined blocks": {"1": True, "[23]": "joined", "re:[123]\\.(drop|norm|act|a|first|rnn)": False},
    "a segment in a hole": {"": True, "2": False, "re:2\\.(linear|up|first|rnn|inner|attention)": True},
}


def put(model: nn.Module, rules: dict[str, Any], everywhere: dict[str, Any] | None = None) -> graphckpt.Handle:
    """Applies the rules whose selectors mean something in this model, and more fields on the whole of it."""
    names = [name for name, _ in model.named_modules()]
    fits = {}
    for selector, value in rules.items():
        pattern = graphckpt.blocks.select._pattern(selector)
        if any(pattern.fullmatch(name) and (name or not selector) for name in names):
            fits[selector] = {"activation_checkpointing": value}
    if everywhere is not None:
        fits[""] = {**fits.get("", {}), **everywhere}
    return graphckpt.apply(model, fits)
