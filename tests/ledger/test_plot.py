"""The picture: errors say what to do, the file is whole and always the same, the names stay few."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import matplotlib.text
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from graphckpt.errors import ConfigError
from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.groups import KINDS, levels_by_kind, rule_colour, thin
from graphckpt.ledger.plot import StepLevels, mark
from graphckpt.ledger.record import Event, Row, TensorLife

PHASES = ("forward", "backward", "recompute", "optimizer")


def record(num_events: int = 40, num_blocks: int = 4, title: str = "TrainStep") -> Explanation:
    timeline = tuple(
        Event(1024 * (1 + at), f"layers.{at * num_blocks // num_events}", PHASES[4 * at // num_events])
        for at in range(num_events)
    )
    return Explanation(title=title, rows=(), bytes_before=4096, bytes_after=1024, timeline=timeline)


def row(block: str, rule: str, place: str = "device") -> Row:
    return Row(block=block, rule=rule, place=place, bytes_before=1, bytes_after=1, runs=1, reruns=0)


@pytest.mark.parametrize(("suffix", "mark"), [("png", b"\x89PNG"), ("svg", b"<svg")])
def test_the_suffix_says_what_is_written_and_the_same_record_gives_the_same_file(
    tmp_path: Path, suffix: str, mark: bytes
) -> None:
    settings = dict(mpl.rcParams)
    first, second = (record().plot(tmp_path / name) for name in (f"step.{suffix}", f"STEP.{suffix.upper()}"))
    assert (first, second) == (tmp_path / f"step.{suffix}", tmp_path / f"STEP.{suffix.upper()}")
    assert mark in first.read_bytes()[:2000]
    assert first.read_bytes() == second.read_bytes()
    assert dict(mpl.rcParams) == settings, "drawing leaves those of matplotlib alone"


def words_of(shown: Explanation, path: Path | str) -> list[str]:
    """Returns the texts of a picture."""
    with mpl.rc_context({"svg.fonttype": "none"}):
        return re.findall(r"<text[^>]*>([^<]*)</text>", shown.plot(path).read_text("utf-8"))


def test_an_svg_says_title_peak_phases_and_blocks(tmp_path: Path) -> None:
    words = words_of(record(num_events=60, num_blocks=30, title="My <step>"), str(tmp_path / "step.svg"))
    for word in ("My &lt;step&gt;", "0", "29", *PHASES, "live bytes of all tensors (KiB)"):
        assert word in words
    assert "peak 60.0 KiB" in words
    assert "optimizer step" in words


def test_an_svg_says_what_policies_there_are_and_what_the_plain_step_takes(tmp_path: Path) -> None:
    rows = (row("layers.0", "full"), row("layers.1", "selective(level 1 of 4)", place="slab"), row("layers.2", "keep"))
    shown = replace(record(), rows=rows, bytes_disk=2048, peak_bytes=40960, plain_levels=(1024,) * 39 + (65536,))
    words = words_of(shown, tmp_path / "step.svg")
    for word in ("without policies (predicted)", "full", "selective(level 1 of 4) + slab", "keep", "layers.2"):
        assert word in words, words
    assert any("offloaded: 2.00 KiB to disk" in word for word in words)
    assert "without policies (predicted)" not in words_of(record(), tmp_path / "step.svg")


_LONG_PATH = "a_model.with_many_names.encoder.stages.{}.layers.attention.self"


@pytest.mark.parametrize("peak_at", [0, 20, 39])
@pytest.mark.parametrize(("num_blocks", "path"), [(1, _LONG_PATH), (12, _LONG_PATH), (2, "{}")])
def test_no_text_is_cut_off_and_none_covers_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak_at: int, num_blocks: int, path: Any
) -> None:
    blocks = [path.format("abcdefghijkl"[at]) for at in range(num_blocks)]
    timeline = [Event(1024, blocks[at * num_blocks // 40], PHASES[4 * at // 40]) for at in range(40)]
    timeline[peak_at] = replace(timeline[peak_at], live_bytes=2**20)
    rows = tuple(row(block, "full", place="host" if len(path) > 2 else "device") for block in blocks)
    shown = replace(
        record(title="LlavaForConditionalGenerationWithAHead"), rows=rows, timeline=tuple(timeline), static_bytes=99,
        peak_bytes=2**20, plain_peak_bytes=2**21, plain_levels=(2**21,) * 40,
    )  # fmt: skip
    seen = []

    def save(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figure.draw_without_rendering()
        texts = [t for t in figure.findobj(mpl.text.Text) if re.search("[a-z]", t.get_text(), re.I)]
        seen.extend((t.get_text(), t.get_window_extent()) for t in texts)
        seen.append(("", figure.bbox))

    monkeypatch.setattr(mpl.figure.Figure, "savefig", save)
    shown.plot(tmp_path / "step.png")
    *texts, (_, whole) = seen
    for text, box in texts:
        assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
        assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
    for (one, box), (other, other_box) in itertools.combinations(texts, 2):
        assert not box.shrunk(0.98, 0.8).overlaps(other_box.shrunk(0.98, 0.8)), (one, other)


@pytest.mark.parametrize(
    "timeline",
    [
        (Event(5, "", "forward"),),
        (Event(0, "", "forward"),),
        (Event(0, "a", "x"), Event(2**40, "", "forward"), Event(0, "$_{$", "backward")),
    ],
)
def test_odd_records_are_drawn(tmp_path: Path, timeline: tuple[Event, ...]) -> None:
    Explanation(title="$x_$", rows=(), bytes_before=0, bytes_after=0, timeline=timeline).plot(tmp_path / "odd.png")


def test_a_long_record_is_drawn_in_bounded_size(tmp_path: Path) -> None:
    path = record(num_events=30_000, num_blocks=200).plot(tmp_path / "long.svg")
    assert path.stat().st_size < 2**20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("step.gif", r"step\.gif: expected a file ending in '\.png', '\.svg' or '\.html', got '\.gif' · fix: rename"),
        ("step", r"got '' · fix"),
        ("missing/step.png", r"expected an existing folder, got '.*missing' · fix: create it first"),
    ],
)
def test_a_path_that_cannot_be_written_says_why(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record().plot(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_record_without_timeline_says_so() -> None:
    empty = Explanation(title="TrainStep", rows=(), bytes_before=0, bytes_after=0)
    with pytest.raises(ConfigError, match=r"the record of 'TrainStep' has none · fix: `with handle\.measure"):
        empty.plot(Path("step.png"))


# ---- kinds and colours


def with_tensors(**change: Any) -> Explanation:
    lives = (
        TensorLife(num_bytes=2048, begin=0, end=None, kind="weights", is_old=True),
        TensorLife(num_bytes=512, begin=1, end=30, saved_by="layers.0", saved_from=2, saved_until=20),
        TensorLife(num_bytes=256, begin=25, end=28, recomputed_by="layers.0"),
    )
    timeline = [
        Event(sum(life.num_bytes for life in lives if life.is_alive(at)), f"layers.{at // 10}", PHASES[at // 10])
        for at in range(40)
    ]
    return replace(record(), timeline=tuple(timeline), tensors=lives, **change)


def test_each_byte_has_the_kind_that_it_has_at_that_time() -> None:
    levels = levels_by_kind(with_tensors())
    assert levels["weights"] == [2048] * 40
    assert levels["saved for backward"] == [512 if 2 <= at < 20 else 0 for at in range(40)]
    assert levels["recomputed"] == [256 if 25 <= at < 28 else 0 for at in range(40)]
    assert levels["transient"] == [512 if at == 1 or 20 <= at < 30 else 0 for at in range(40)]


def test_the_areas_of_the_picture_are_kinds_and_reach_the_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads the pixels in the middle of the areas, one event after another."""
    shown = with_tensors()
    path = tmp_path / "step.png"
    seen = {}

    def save(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figure.draw_without_rendering()
        axes = figure.axes[-1]
        seen["at"] = lambda at, level: axes.transData.transform((at, level / 1024))
        real(figure, *args, **kwargs)

    real = mpl.figure.Figure.savefig
    monkeypatch.setattr(mpl.figure.Figure, "savefig", save)
    shown.plot(path)
    pixels = mpl.image.imread(path)
    for at, level, kind in (
        (5.5, 1000, "weights"), (5.5, 2300, "saved for backward"), (25.5, 2200, "recomputed"),
        (25.5, 2500, "transient"), (39.5, 1000, "weights"),
    ):  # fmt: skip
        x, y = map(round, seen["at"](at, level))
        assert mpl.colors.to_hex(pixels[pixels.shape[0] - y, x]) == KINDS[kind], (at, level)
    x, y = map(round, seen["at"](39.5, 2300))
    assert mpl.colors.to_hex(pixels[pixels.shape[0] - y, x]) == "#ffffff", "nothing above the level"


def test_no_pale_line_parts_the_areas() -> None:
    step = StepLevels(with_tensors(), limit=10)
    assert list(step.bands) == ["transient", "recomputed", "saved for backward", "weights"], "the highest first"
    for upper, lower in itertools.pairwise(step.bands.values()):
        assert all(high >= low for high, low in zip(upper, lower, strict=True)), "each covers all below it"
    assert step.bands["transient"] == pytest.approx(step.levels)


def test_no_pale_line_parts_the_strip(tmp_path: Path) -> None:
    rows = tuple(row(f"layers.{number}", "full") for number in range(4))
    pixels = mpl.image.imread(with_tensors(rows=rows).plot(tmp_path / "step.png"))
    first = mpl.colors.to_rgb(rule_colour("full"))
    at = next(y for y in range(len(pixels)) if (abs(pixels[y, :, :3] - first).max(axis=1) < 0.01).sum() > 300)
    line = pixels[at + 4, :, :3]
    orange = [x for x in range(len(line)) if abs(line[x] - first).max() < 0.01]
    parts = line[orange[0] : orange[-1]]
    assert len(parts) > 1000
    assert parts.sum(axis=1).max() < sum(first) + 0.02, "each pixel has the colour of the policy, or is a dark edge"


def test_the_strip_names_the_running_layers_in_the_colour_of_their_policy() -> None:
    shown = replace(
        with_tensors(), rows=(row("layers.0", "full"), row("layers.1", "full", place="host"), row("layers.2", "keep"))
    )
    parts = list(StepLevels(shown, limit=40).blocks())
    assert [(part.label, part.begin, part.end) for part in parts] == [
        ("layers.0", 0, 10), ("layers.1", 10, 20), ("layers.2", 20, 30), ("layers.3", 30, 40),
    ]  # fmt: skip
    assert parts[0].colour == rule_colour("full") != parts[1].colour
    assert parts[2].colour == rule_colour("keep")


def test_the_legend_is_sorted_and_says_the_bytes_of_each_kind_at_the_peak(tmp_path: Path) -> None:
    words = words_of(with_tensors(rows=(row("layers.0", "full"), row("layers.1", "keep"))), tmp_path / "step.svg")
    expected = ["transient: 512 B", "recomputed: 256 B", "weights: 2.00 KiB", "phase", "keep", "full"]
    assert [word for word in words if word in expected] == ["phase", *expected], "the strip comes first"


RULES = ("keep", "full", "selective(matmul)", "segments(2)", "joined", "tiles(8)", "part", "own checkpointing")


def test_every_rule_has_one_colour_of_its_own() -> None:
    colours = {rule_colour(rule) for rule in RULES}
    assert len(colours) == len(RULES)
    assert rule_colour("segments(2)") == rule_colour("segments(4)")
    assert rule_colour("full") != rule_colour("full + host") == rule_colour("full + disk")
    levels = [rule_colour(f"selective(level {level} of 9)") for level in range(1, 10)]
    assert len(set(levels)) == 9
    assert levels[0] == rule_colour("selective(level 1)"), "as a sweep names it"
    assert rule_colour("a rule of a plug-in") == rule_colour("a rule of a plug-in")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 60))
def test_thinning_keeps_the_peak_and_the_order(levels: list[int], limit: int) -> None:
    steps = thin(levels, limit)
    assert len(steps) <= limit
    assert max(levels[at] for _, at in steps) == max(levels)
    assert [at for at, _ in steps] == sorted(at for at, _ in steps)
    if limit >= len(levels):
        assert [levels[at] for _, at in steps] == levels


@pytest.mark.parametrize("at", [3, 50, 97])
@pytest.mark.parametrize(
    "line",
    [
        pytest.param([(0, 51.0)], id="a budget just above the peak"),
        pytest.param([(0, 20.0), (20, 90.0), (60, 54.0), (90, 51.0)], id="a curve that falls across the label"),
        pytest.param([(0, 95.0), (40, 99.0)], id="a curve far above"),
    ],
)
def test_the_label_of_a_peak_covers_no_line(at: float, line: list[tuple[float, float]]) -> None:
    figure = Figure(figsize=(11, 5.2), dpi=150)
    axes = figure.subplots()
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 118)
    mark(axes, at, 50.0, "peak 50.0 MiB\nthe head and the loss, after transformer.h.5", [line])
    (label,) = axes.texts
    box = label.get_window_extent().transformed(axes.transData.inverted())
    assert 50 < box.y0 < box.y1 <= 118, "above the peak, and within the axes"
    ends = [x for x, _ in line[1:]] + [100.0]
    levels = [level for (x, level), end in zip(line, ends, strict=True) if x <= box.x1 and end >= box.x0]
    pairs = [sorted((a, b)) for a, b in itertools.pairwise(levels)]
    for low, high in [*pairs, *((level, level) for level in levels)]:
        assert high < box.y0 or low > box.y1
