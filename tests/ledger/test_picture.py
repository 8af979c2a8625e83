"""The picture: errors say what to do, the file is whole and always the same, the names stay few."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.figure
import matplotlib.text
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphckpt.errors import ConfigError
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.legend import legend_names, shades
from graphckpt.ledger.levels import thin
from graphckpt.ledger.plot import draw
from graphckpt.ledger.record import Event, Row

PHASES = ("forward", "backward", "recompute", "optimizer")


def record(num_events=40, num_blocks=4, title="TrainStep"):
    timeline = tuple(
        Event(1024 * (1 + at), f"layers.{at * num_blocks // num_events}", PHASES[4 * at // num_events])
        for at in range(num_events)
    )
    return Explanation(title=title, rows=(), bytes_before=4096, bytes_after=1024, timeline=timeline)


def row(block, rule, place="device"):
    return Row(block=block, rule=rule, place=place, bytes_before=1, bytes_after=1, runs=1, reruns=0)


@pytest.mark.parametrize("name", ["step.png", "STEP.PNG", "step.svg"])
def test_the_suffix_says_what_is_written(tmp_path, name):
    path = draw(record(), tmp_path / name)
    assert path == tmp_path / name
    start = path.read_bytes()[:200]
    assert b"\x89PNG" in start if name.lower().endswith("png") else b"<svg" in path.read_bytes()[:2000]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_record_gives_the_same_file(tmp_path, suffix):
    first, second = (draw(record(), tmp_path / f"{name}.{suffix}") for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_an_svg_says_title_peak_phases_and_blocks(tmp_path):
    with mpl.rc_context({"svg.fonttype": "none"}):
        text = draw(record(num_blocks=30, title="My <step>"), str(tmp_path / "step.svg")).read_text("utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    for word in ("My &lt;step&gt;", "layers.0-29", *PHASES, "live bytes of all tensors (KiB)"):
        assert word in words
    assert "peak 40.0 KiB" in words
    assert "optimizer step" in words


def test_an_svg_says_what_no_policy_changes_what_policies_there_are_and_what_the_plain_step_takes(tmp_path):
    rows = (row("layers.0", "full"), row("layers.1", "selective(level 1 of 4)", place="slab"), row("layers.2", "keep"))
    shown = replace(record(), rows=rows, static_bytes=2048, peak_bytes=40960, plain_levels=(1024,) * 39 + (65536,))
    with mpl.rc_context({"svg.fonttype": "none"}):
        text = draw(shown, tmp_path / "step.svg").read_text("utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    for word in (
        "weights, optimizer (2.00 KiB)",
        "without policies (predicted)",
        "layers.0 · full",
        "layers.1 · level 1 of 4 + slab",
        "layers.2",
    ):
        assert word in words, words
    assert "without policies (predicted)" not in draw(record(), tmp_path / "step.svg").read_text("utf-8")


_LONG_PATH = "a_model.with_many_names.encoder.stages.{}.layers.attention.self"


@pytest.mark.parametrize("peak_at", [0, 20, 39])
@pytest.mark.parametrize(("num_blocks", "path"), [(1, _LONG_PATH), (12, _LONG_PATH), (2, "{}")])
def test_no_text_is_cut_off_and_none_covers_another(tmp_path, monkeypatch, peak_at, num_blocks, path):
    blocks = [path.format("abcdefghijkl"[at]) for at in range(num_blocks)]
    timeline = [Event(1024, blocks[at * num_blocks // 40], PHASES[4 * at // 40]) for at in range(40)]
    timeline[peak_at] = replace(timeline[peak_at], live_bytes=2**20)
    rows = tuple(row(block, "full", place="host" if len(path) > 2 else "device") for block in blocks)
    shown = replace(
        record(title="LlavaForConditionalGenerationWithAHead"), rows=rows, timeline=tuple(timeline), static_bytes=99,
        peak_bytes=2**20, plain_peak_bytes=2**21, plain_levels=(2**21,) * 40,
    )  # fmt: skip
    seen = []

    def save(figure, *args, **kwargs):
        figure.draw_without_rendering()
        texts = [t for t in figure.findobj(mpl.text.Text) if re.search("[a-z]", t.get_text(), re.I)]
        seen.extend((t.get_text(), t.get_window_extent()) for t in texts)
        seen.append(("", figure.bbox))

    monkeypatch.setattr(mpl.figure.Figure, "savefig", save)
    draw(shown, tmp_path / "step.png")
    *texts, (_, whole) = seen
    for text, box in texts:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
    for (one, box), (other, other_box) in itertools.combinations(texts, 2):
        assert not box.shrunk(0.98, 0.8).overlaps(other_box.shrunk(0.98, 0.8)), (one, other)


def test_drawing_leaves_matplotlibs_settings_alone(tmp_path):
    before = dict(mpl.rcParams)
    draw(record(), tmp_path / "step.png")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    "timeline",
    [
        (Event(5, "", "forward"),),
        (Event(0, "", "forward"),),
        (Event(0, "a", "x"), Event(2**40, "", "forward"), Event(0, "$_{$", "backward")),
    ],
)
def test_odd_records_are_drawn(tmp_path, timeline):
    draw(
        Explanation(title="$x_$", rows=(), bytes_before=0, bytes_after=0, timeline=timeline),
        tmp_path / "odd.png",
    )


def test_a_long_record_is_drawn_in_bounded_size(tmp_path):
    path = draw(record(num_events=100_000, num_blocks=200), tmp_path / "long.svg")
    assert path.stat().st_size < 2**20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step.gif", r"step\.gif: expected a file ending in '\.png', '\.svg' or '\.html', got '\.gif' · fix: rename"),
        ("step", r"got '' · fix"),
        ("missing/step.png", r"expected an existing folder, got '.*missing' · fix: create it first"),
    ],
)
def test_a_path_that_cannot_be_written_says_why(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        draw(record(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_timeline_says_so():
    empty = Explanation(title="TrainStep", rows=(), bytes_before=0, bytes_after=0)
    with pytest.raises(ConfigError, match=r"the record of 'TrainStep' has none · fix: `with handle\.measure"):
        draw(empty, Path("step.png"))


# ---- names and colours


def test_few_blocks_stand_for_themselves():
    assert legend_names(["", "a", "b.0", "a"]) == {"": "outside of blocks", "a": "a", "b.0": "b.0"}


def test_layers_of_a_stack_stand_together():
    names = legend_names(["wte", *(f"h.{i}" for i in range(24)), *(f"g.{i}" for i in range(3, 9)), "x.7"])
    assert set(names.values()) == {"wte", "h.0-23", "g.3-8", "x.7"}


def test_parts_of_layers_join_their_layer_when_they_are_too_many():
    names = legend_names(f"h.{i}.p{part}" for i in range(3) for part in range(20))
    assert set(names.values()) == {"h.0-2"}


def test_what_runs_longest_keeps_its_name():
    blocks = [f"b{chr(97 + i)}" for i in range(20) for _ in range(20 - i)]
    names = legend_names(blocks)
    assert [block for block in names if names[block] == "other blocks"] == [f"b{chr(97 + i)}" for i in range(11, 20)]
    assert len(set(names.values())) == 12


def test_layers_get_darker_and_parts_have_the_shade_of_their_layer():
    colours = shades(dict.fromkeys(("h.0", "h.1.attn", "h.1.mlp", "h.2"), "h") | {"x": "x"})
    assert sum(colours["h.0"]) > sum(colours["h.1.attn"]) > sum(colours["h.2"])
    assert colours["h.1.attn"] == colours["h.1.mlp"]
    assert colours["x"] != colours["h.2"]


PATHS = st.lists(st.from_regex(r"\A([a-c]|[0-9]{1,2}){0,3}(\.([a-c]|[0-9]{1,2})){0,3}\Z"), min_size=1, max_size=60)


@given(PATHS)
def test_every_block_has_a_name_and_a_colour_and_names_are_few(blocks):
    names = legend_names(blocks)
    assert set(names) == set(blocks)
    assert len(set(names.values())) <= 12
    assert all(0 <= value <= 1 for colour in shades(names).values() for value in colour)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 60))
def test_thinning_keeps_the_peak_and_the_order(levels, limit):
    steps = thin([Event(level, "", "forward") for level in levels], limit)
    assert len(steps) <= limit
    assert max(event.live_bytes for _, event in steps) == max(levels)
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)
    if limit >= len(levels):
        assert [event.live_bytes for _, event in steps] == levels


def test_the_library_imports_without_matplotlib():
    code = "import sys, graphckpt.ledger.plot; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
