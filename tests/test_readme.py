"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import graphckpt

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_step_in_oneflows_style(capsys: Any) -> None:
    names = {"x": torch.randn(8, 256), "y": torch.randint(0, 10, (8,))}
    exec(BLOCKS[0], names)
    assert names["loss"].shape == ()
    assert re.search(r"model\.0 +full ", capsys.readouterr().out)


def test_the_tiled_loss_head() -> None:
    names: dict[str, Any] = {"nn": nn, "graphckpt": graphckpt}
    definition, _, use = BLOCKS[2].partition("\n\ngraphckpt.apply")
    exec(definition, names)
    head = names["LossHead"](8, 20)
    names["model"] = nn.ModuleDict({"loss_head": head})
    hidden, labels = torch.randn(16, 8, requires_grad=True), torch.randint(0, 20, (16,))
    (plain,) = torch.autograd.grad(head(hidden, labels), hidden)
    runs = []
    head.head.register_forward_pre_hook(lambda _, args: runs.append(args[0].shape[0]))
    exec("graphckpt.apply" + use, names)
    (tiled,) = torch.autograd.grad(head(hidden, labels), hidden)
    torch.testing.assert_close(tiled, plain)
    assert runs[:8] == [2] * 8
