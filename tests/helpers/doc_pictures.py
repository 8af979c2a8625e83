"""Makes the pictures of a step and the screenshots of the interactive pages for the docs.

``PYTHONPATH=.:tests python tests/helpers/doc_pictures.py docs/images`` writes ``step.png``, ``step_report.png`` and
``plan_report.png``. Those of a plan, a sweep and a fit are by the commands beside them in the docs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from helpers.browser import opened

SIZE = {
    "n_layer": 6, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 1000, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
BOX = """(() => {
  const box = document.querySelector(".nsewdrag").getBoundingClientRect();
  return [box.x, box.y, box.width, box.height];
})()"""


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZE))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (8, 128))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as pages:
        page_of_step, page_of_plan = Path(pages) / "step.html", Path(pages) / "plan.html"
        with graphckpt.apply(model, {"transformer.h.*": True, "transformer.h.5": "selective"}) as handle:
            step()
            with handle.measure():
                step()
            handle.explain(plot=str(page_of_step), show=False).plot(folder / "step.png")
        graphckpt.plan(model, step, memory_budget=0.4).plot(page_of_plan)
        with opened(page_of_step) as page:
            page.resize(1200, 1300)
            x, y, width, height = page.evaluate(BOX)
            page.point_at(x + 0.61 * width, y + 0.3 * height)
            page.screenshot(folder / "step_report.png")
        with opened(page_of_plan) as page:
            page.resize(1200, 1130)
            page.screenshot(folder / "plan_report.png")
    for name in ("step.png", "step_report.png", "plan_report.png"):
        with Image.open(folder / name) as image:
            image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                folder / name, optimize=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
