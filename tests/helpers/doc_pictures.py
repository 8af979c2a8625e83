"""Makes the pictures of a step and the screenshots of the interactive pages for the docs.

``PYTHONPATH=.:tests python tests/helpers/doc_pictures.py docs/images`` writes ``step.png``, ``step_report.png``,
``plan_report.png`` and ``notebook.png``, from the stored outputs of ``examples/notebook.ipynb``. Those of a plan, a
sweep and a fit are by the commands beside them in the docs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from html import escape
from pathlib import Path

import torch
from PIL import Image
from transformers import GPT2Config, GPT2LMHeadModel

import graphckpt
from helpers.browser import opened

SIZE = {"n_layer": 6, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
BOX = "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('.nsewdrag').getBoundingClientRect())"


def draw_example(folder: Path) -> None:
    """Draws the step of the README, the same as in its table."""
    model = GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 1000, (4, 128))
    with graphckpt.apply(model, True) as handle, handle.measure():
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.explain(plot=str(folder / "step.png"), show=False)


def main(folder: Path) -> None:
    draw_example(folder)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0))
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
            handle.explain(plot=str(page_of_step), show=False)
        graphckpt.plan(model, step, memory_budget=0.4).plot(page_of_plan)
        with opened(page_of_step) as page:
            page.resize(1200, 1300)
            x, y, width, height = page.evaluate(BOX)
            page.point_at(x + 0.61 * width, y + 0.3 * height)
            page.screenshot(folder / "step_report.png")
        with opened(page_of_plan) as page:
            page.resize(1200, 1130)
            page.screenshot(folder / "plan_report.png")
        draw_notebook(folder / "notebook.png", Path(pages))
    for name in ("step.png", "step_report.png", "plan_report.png", "notebook.png"):
        with Image.open(folder / name) as image:
            small = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(folder / name, optimize=True)


def draw_notebook(target: Path, pages: Path) -> None:
    """Shows the first cells with an output below each other, as a notebook does."""
    cells = json.loads((Path(__file__).parents[2] / "examples/notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    body = ""
    for cell in [cell for cell in cells if cell.get("outputs")][:2]:
        body += f"<pre>{escape(''.join(cell['source']))}</pre>"
        body += "".join("".join(output["data"]["text/html"]) for output in cell["outputs"])
    style = "body {font: 14px sans-serif; margin: 16px} pre {background: #f4f5f7; padding: 10px; border-radius: 4px}"
    page_file = pages / "notebook.html"
    page_file.write_text(f"<!doctype html><meta charset=utf-8><style>{style}</style>{body}", encoding="utf-8")
    with opened(page_file) as page:
        page.resize(1000, 1700)
        page.screenshot(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
