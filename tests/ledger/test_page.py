"""The page of a step: it holds the tensors, sums to the peak, stays small, and works in a browser without a network."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.browser import needs_chromium, opened
from helpers.layer_stacks import mlp_layers

import graphckpt
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.groups import KINDS, Part, composition, rule_colour
from graphckpt.ledger.page import _MAX_POINTS
from graphckpt.ledger.plot import StepLevels
from graphckpt.ledger.record import Event, Row, TensorLife

MOST_BYTES = 6_000_000
PHASES = ("forward", "recompute", "backward", "optimizer")


def step(path: Path | None = None) -> Explanation:
    torch.manual_seed(0)
    model = mlp_layers(3)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2048, 16)
    with graphckpt.apply(model, {"*": True}) as handle:
        for _ in range(2):
            with handle.measure():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return handle.explain(plot=None if path is None else str(path), show=False)


def long_record(num_events: int = 100_000, num_blocks: int = 200) -> Explanation:
    """A record of many events with long names; each tensor is freed at the event after its own."""
    blocks = [f"model.with.a.long.prefix.before.layers.{number}.self_attention" for number in range(num_blocks)]
    pairs = num_events // 2
    level = 4 * 4 * num_blocks
    timeline, tensors = [], []
    for pair in range(pairs):
        block, phase = blocks[pair * 7919 % num_blocks], PHASES[4 * pair // pairs]
        size = 2**30 if pair == pairs // 3 else 1024 * (1 + pair % 97)
        timeline += [Event(level + size, block, phase), Event(level, block, phase)]
        tensors.append(
            TensorLife(
                num_bytes=size, begin=2 * pair, end=2 * pair + 1, block=block, phase=phase, shape=(1, 2, 3, 4),
                dtype="bfloat16", op="aten._scaled_dot_product_flash_attention_for_cpu.default",
                source="modeling_with_a_long_name.py:1234 in scaled_dot_product_attention", saved_by=block,
                saved_from=2 * pair, saved_until=2 * pair + 1,
            )
        )  # fmt: skip
    kinds = ("weights", "gradients", "optimizer states", "inputs", "")
    old = [
        replace(tensors[number], num_bytes=4, begin=0, end=None, is_old=True, kind=kinds[number % 5], saved_until=0)
        for number in range(4 * num_blocks)
    ]
    rows = tuple(
        Row(block=block, rule=f"selective(level {at} of 9)", bytes_before=1, bytes_after=1, runs=1, reruns=1)
        for at, block in enumerate(blocks)
    )
    peak = max(event.live_bytes for event in timeline)
    return Explanation(
        title="Long", rows=rows, bytes_before=0, bytes_after=0, peak_bytes=peak, timeline=tuple(timeline),
        tensors=(*old, *tensors), plain_levels=tuple(event.live_bytes * 2 for event in timeline), static_bytes=level,
    )  # fmt: skip


def check_sums(part: Part) -> None:
    assert not part.parts or sum(child.num_bytes for child in part.parts) == part.num_bytes
    for child in part.parts:
        check_sums(child)


def test_the_composition_sums_to_the_peak_to_the_byte() -> None:
    seen = step()
    whole = composition(seen)
    assert whole.num_bytes == seen.peak_bytes
    check_sums(whole)
    sizes = {part.name: part.num_bytes for part in whole.parts}
    assert sizes["weights"] + sizes["optimizer states"] == seen.static_bytes
    assert sizes["saved for backward"] > 0


def test_many_blocks_and_tensors_are_summed_up() -> None:
    lives = tuple(TensorLife(num_bytes=n + 1, begin=0, end=None, block=f"b{n % 90}") for n in range(900))
    total = sum(life.num_bytes for life in lives)
    whole = composition(
        Explanation(
            title="", rows=(), bytes_before=0, bytes_after=0, timeline=(Event(total, "", "forward"),), tensors=lives
        )
    )
    check_sums(whole)
    assert whole.num_bytes == total
    (transient,) = whole.parts
    assert transient.parts[-1].name == "66 other blocks"
    assert transient.parts[0].parts[-1].name == "6 other tensors"


def test_the_page_is_one_file_with_its_title_and_the_colours_of_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    seen = step(path)
    text = path.read_text("utf-8")
    assert text.startswith('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">')
    assert "<title>Sequential: memory of a training step</title>" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]* (src|href)=", text)
    assert path.stat().st_size < MOST_BYTES
    picture = seen.plot(tmp_path / "step.svg").read_text("utf-8")
    for colour in [*(KINDS[part.name] for part in composition(seen).parts), rule_colour("full")]:
        assert colour in text, colour
        assert colour in picture, colour


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    bad = "<img src=x onerror=alert(1)>"
    life = TensorLife(num_bytes=8, begin=0, end=None, block=bad, saved_by=bad, source=bad, dtype="int8", shape=(8,))
    record = Explanation(
        title=bad, rows=(), bytes_before=0, bytes_after=0, peak_bytes=8, timeline=(Event(8, bad, "forward"),),
        tensors=(life,),
    )  # fmt: skip
    text = record.plot(tmp_path / "step.html").read_text("utf-8")
    assert "<img" not in text
    assert "\\u003cimg" not in text


def test_a_long_step_is_a_small_page_with_the_exact_peak(tmp_path: Path) -> None:
    record = long_record(30_000)
    assert record.plot(tmp_path / "long.html").stat().st_size < MOST_BYTES
    step = StepLevels(record, _MAX_POINTS)
    assert max(step.levels) * step.scale == record.peak_bytes
    assert composition(record).num_bytes == record.peak_bytes


PLOT_BOX = """(() => {
  const box = document.querySelector("#levels .nsewdrag").getBoundingClientRect();
  return [box.x, box.y, box.width, box.height];
})()"""
HOVER = "[...document.querySelectorAll('#levels .hoverlayer tspan')].map(line => line.textContent)"
POINTS = """document.querySelector("#levels").data.map(trace => trace.x.length).reduce((a, b) => a + b)"""
TREE = """(() => {
  const tree = document.querySelector("#composition").data[0];
  return tree.values.filter((_, at) => tree.parents[at] === "0").reduce((a, b) => a + b);
})()"""


@pytest.mark.slow
@needs_chromium
def test_pointing_shows_the_tensor_without_a_network(tmp_path: Path) -> None:
    seen = step(tmp_path / "step.html")
    gelu = next(life for life in seen.tensors if life.op.startswith("aten.gelu") and life.phase == "forward")
    with opened(tmp_path / "step.html") as page:
        x, y, width, height = page.evaluate(PLOT_BOX)
        page.point_at(x + width * gelu.begin / len(seen.timeline), y + height / 2)
        text = "".join(page.evaluate(HOVER))
        assert "allocates float32[2048, 64], 512 KiB" in text
        assert "aten.gelu.default in 0" in text
        assert "test_page.py:" in text
        assert f"allocated at {gelu.begin}, freed at {gelu.end}" in text
        assert page.evaluate(TREE) == seen.peak_bytes
        before = page.evaluate("document.querySelector('#levels').layout.xaxis.range")
        page.drag((x + width * 0.3, y + height * 0.3), (x + width * 0.6, y + height * 0.6))
        first, last = page.evaluate("document.querySelector('#levels').layout.xaxis.range")
        assert before[0] < first < last < before[1], "zoomed"
        page.set_dark()
        assert page.evaluate("getComputedStyle(document.body).color") == "rgb(227, 230, 234)"
        assert page.evaluate("document.querySelector('#levels').layout.font.color") == "#e3e6ea"
        assert page.evaluate("document.querySelector('#levels').layout.annotations[0].bgcolor") == "#1b1e24"
        assert page.faults == []
        assert page.requests == []


@pytest.mark.slow
@needs_chromium
def test_a_hundred_thousand_events_stay_responsive(tmp_path: Path) -> None:
    record = long_record()
    record.plot(tmp_path / "long.html")
    with opened(tmp_path / "long.html") as page:
        x, y, width, height = page.evaluate(PLOT_BOX)
        page.point_at(x + width / 2, y + height / 2)
        assert any("bfloat16[1, 2, 3, 4]" in line for line in page.evaluate(HOVER))
        assert page.evaluate(POINTS) <= 20_000
        assert page.faults == []
