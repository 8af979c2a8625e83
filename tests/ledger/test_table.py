"""The printed table: plain text to the letter, folding of layers, and the same numbers on a terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphckpt.ledger.explanation import Explanation
from graphckpt.ledger.groups import group_rows
from graphckpt.ledger.record import Event, Row
from graphckpt.ledger.table import print_table

MIB = 2**20
LAYER = Row(
    block="transformer.h.0",
    rule="full",
    bytes_before=6 * MIB,
    bytes_after=MIB // 2,
    runs=1,
    reruns=1,
    forward_seconds=0.001,
    recompute_seconds=0.002,
)


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def layers(num: int, **change: Any) -> tuple[Row, ...]:
    return tuple(replace(LAYER, block=f"transformer.h.{i}", **change) for i in range(num))


def explanation(rows: Sequence[Row], **change: Any) -> Explanation:
    fields = {
        "title": "TrainStep",
        "rows": rows,
        "bytes_before": sum(row.bytes_before for row in rows),
        "bytes_after": sum(row.bytes_after for row in rows),
    }
    return Explanation(**fields | change)


def printed(record: Explanation, stream: io.StringIO | None = None) -> str:
    stream = stream or io.StringIO()
    print_table(record, stream)
    return stream.getvalue()


GPT = explanation(
    (
        replace(LAYER, block="transformer.wte", rule="keep", bytes_after=6 * MIB, reruns=0, recompute_seconds=None),
        *layers(12),
        replace(LAYER, block="lm_head", rule="tiles(8)", place="host", note="anew"),
    ),
    peak_bytes=123 * MIB,
    plain_peak_bytes=200 * MIB,
    warnings=("lm_head.offload: of CPU tensors has no effect", "one more"),
)


def test_plain_text_to_the_letter() -> None:
    assert (
        printed(GPT)
        == """\
TrainStep: bytes kept for backward, before and after
block                     rule               before     after  recomputed
-------------------------------------------------------------------------
transformer.wte           keep             6.00 MiB  6.00 MiB           0
transformer.h.0-11 (12x)  full             72.0 MiB  6.00 MiB          12
lm_head                   tiles(8) + host  6.00 MiB   512 KiB           1
-------------------------------------------------------------------------
total                                      84.0 MiB  12.5 MiB          13

block                     forward  recompute
--------------------------------------------
transformer.wte           1.00 ms          -
transformer.h.0-11 (12x)  12.0 ms    24.0 ms
lm_head                   1.00 ms    2.00 ms
--------------------------------------------
total                     14.0 ms    26.0 ms
kept for backward: 84.0 MiB -> 12.5 MiB, 71.5 MiB less (85 %)
peak memory: 200 MiB (predicted) -> 123 MiB, 77.0 MiB less (38 %)
* lm_head: anew
- lm_head.offload: of CPU tensors has no effect
- one more
"""
    )


def test_the_peak_says_what_runs_then_and_what_no_policy_can_change() -> None:
    timeline = (Event(5 * MIB, "h.0", "forward"), Event(9 * MIB, "h.1", "recompute"))
    text = printed(explanation(layers(1), peak_bytes=9 * MIB, timeline=timeline, static_bytes=2 * MIB))
    assert "peak memory: 9.00 MiB\n" in text
    assert "reached during the recomputation of h.1; 2.00 MiB are weights and optimizer\nstates\n" in text


def test_a_model_that_is_one_block_is_named_at_the_peak() -> None:
    for phase, what in (("recompute", "recomputation of TrainStep"), ("backward", "backward, outside any block")):
        assert explanation(layers(1), timeline=(Event(MIB, "", phase),)).peak_at == what


def test_a_peak_outside_of_the_blocks_has_the_name_that_plans_have() -> None:
    forward = [Event(MIB, "", "forward"), Event(MIB, "h.0", "forward"), Event(MIB, "", "forward")]
    step = [*forward, Event(MIB, "h.1", "forward"), Event(MIB, "", "forward"), Event(MIB, "", "backward")]
    step += [Event(MIB, "h.1", "backward"), Event(MIB, "", "backward"), Event(MIB, "h.0", "backward")]
    head = "the head and the loss, after h.1"
    places = {
        0: "before the first block",
        2: "after the forward of h.0",
        4: head,
        5: head,
        7: "after the backward of h.1",
    }
    for at, place in places.items():
        timeline = tuple(replace(event, live_bytes=2 * MIB) if n == at else event for n, event in enumerate(step))
        assert explanation(layers(1), timeline=timeline).peak_at == place
    with_head = [*step[:5], Event(MIB, "lm_head", "forward"), Event(2 * MIB, "", "forward"), *step[5:]]
    assert explanation(layers(1), timeline=tuple(with_head)).peak_at == head


def test_only_blocks_with_times_are_in_the_table_of_times() -> None:
    rows = [replace(row, forward_seconds=None, recompute_seconds=None) for row in layers(3)]
    rows[1] = replace(rows[1], place="disk", bytes_disk=MIB, copy_seconds=0.1, wait_seconds=0.0)
    text = printed(explanation(tuple(replace(row, block=f"transformer.h.{3 * n}") for n, row in enumerate(rows))))
    assert [text.count(f"transformer.h.{3 * n} ") for n in range(3)] == [1, 2, 1]


OPS = tuple(f"aten.some_op_{number}.default[0,1,2]" for number in range(9))


def test_lists_of_ops_stand_below_the_table() -> None:
    rules = [f"selective({', '.join(OPS[:n])})" for n in (9, 8)]
    rows = [replace(LAYER, block=f"h.{number}", rule=rules[number % 2]) for number in range(6)]
    text = printed(explanation(tuple(rows), legend=(("selective(level 1 of 4)", f"keeps {OPS}"),)))
    table, _, below = text.partition("kept for backward:")
    assert "selective(9 ops: 1)" in table
    assert "selective(8 ops: 2)" in table
    assert "aten" not in table
    assert "* selective(level 1 of 4) keeps" in below
    assert below.count("aten.some_op_0") == 3


WIDE = replace(
    LAYER,
    rule="selective(matmul+attention)",
    place="host + disk",
    bytes_host=MIB,
    runs=8,
    copy_seconds=1.0,
    wait_seconds=0.5,
    note="a note that is as long as notes are, for it says what a store did with the tensors of this block",
)


@pytest.mark.parametrize("block", ["h.0", "a_model.with.many.names.that.are_long.encoder.layers.17.attention.output"])
def test_every_line_fits_80_columns(block: str) -> None:
    rows = (replace(WIDE, block=block), replace(WIDE, block="", bytes_disk=3 * MIB, rule="full"))
    record = explanation(
        rows, peak_bytes=5, timeline=(Event(5, block, "backward"),), static_bytes=3, warnings=(WIDE.note * 3,)
    )
    assert max(map(len, printed(record).splitlines())) <= 80


def test_print_goes_to_the_stdout_of_now_and_ignores_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = GPT.rows
    print_table(GPT)
    assert capsys.readouterr().out == printed(GPT)
    assert GPT.rows is rows
    assert len(rows) == 14, "those of the explanation stay whole"


@pytest.mark.parametrize("width", [70, 100, 250])
def test_a_terminal_gets_every_number_whole(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    text = printed(GPT, Terminal())
    assert "\x1b[" in text, "colour"
    for number in ("72.0 MiB", "512 KiB", "12.5 MiB", "84.0 MiB", "123 MiB"):
        assert number in text
    assert "transformer.h.0-11 (12x)" in text
    assert "one more" in text


def test_an_explanation_shows_itself(tmp_path: Path) -> None:
    assert str(GPT) + "\n" == printed(GPT)
    assert repr(GPT) == "<Explanation of TrainStep: 14 rows, kept for backward 84.0 MiB -> 12.5 MiB>"
    html = GPT._repr_html_()
    assert html.startswith('<div class="graphckpt"><style>')
    assert '<td class="number">84.0 MiB</td>' in html, "the total"
    assert "<img" not in html, "nothing to draw without a timeline"
    assert "transformer.h.0-11 (12x)" in html
    record = explanation(layers(2), timeline=(Event(5 * MIB, "h.0", "forward"),), plain_levels=(6 * MIB,))
    assert record._repr_html_().count('<img alt="memory of the step" src="data:image/png;base64,') == 1
    values = json.loads(json.dumps(record.to_dict()))
    assert values["bytes_before"] == record.bytes_before
    assert values["peak_at"] == "forward of h.0"
    assert [row["block"] for row in values["rows"]] == [row.block for row in record.rows]
    assert "timeline" not in values
    assert record.plot(tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_text_in_brackets_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    record = explanation((replace(LAYER, note="[red]x[/red]"),), title="[bold]", warnings=("[/]",))
    for stream in (io.StringIO(), Terminal()):
        text = printed(record, stream)
        assert all(part in text for part in ("[red]", "[bold]", "[/]"))


def test_an_empty_record_and_one_that_keeps_more_or_has_no_times_still_print() -> None:
    text = printed(explanation(layers(2, forward_seconds=None, recompute_seconds=None)))
    assert text.splitlines()[1].split() == ["block", "rule", "before", "after", "recomputed"]
    assert "kept for backward: 0 B -> 0 B, 0 B less\n" in printed(explanation(()))
    more = explanation((replace(LAYER, block="", bytes_before=1024, bytes_after=1536),))
    assert "(model)" in printed(more)
    assert "1.00 KiB -> 1.50 KiB, 512 B more (50 %)" in printed(more)


def test_totals_count_a_block_inside_another_once() -> None:
    rows = replace(LAYER, block="h.0"), replace(LAYER, block="h.0.attn", rule="keep"), replace(LAYER, block="h.01")
    total = next(line for line in printed(explanation(rows)).splitlines() if line.startswith("total"))
    assert total.split()[-5:] == ["2", "2.00", "ms", "4.00", "ms"]


def test_a_nested_block_stands_below_its_parent() -> None:
    rows = [replace(LAYER, block=block) for block in ("wte", "h.0", "h.1", "head", "h.1.attn", "h.0.mlp", "h.0.mlp.up")]
    text = printed(explanation(tuple(replace(row, runs=at) for at, row in enumerate(rows))))
    order = [line.split()[0] for line in text.splitlines() if line.startswith(("wte", "h"))]
    assert order == ["wte", "h.0", "h.0.mlp", "h.0.mlp.up", "h.1", "h.1.attn", "head"]


PEFT = ("embed_tokens", "layers.0", "layers.0.self_attn.rotary_embeddings_of_a_long_name", "layers.1", "norm")


def test_a_common_prefix_is_said_once() -> None:
    rows = [replace(LAYER, block=f"base_model.model.model.{block}", runs=at) for at, block in enumerate(PEFT)]
    text = printed(
        explanation((*rows, replace(LAYER, block="base_model.model.lm_head"), replace(LAYER, block="(else)")))
    )
    assert text.count("base_model.model") == 1
    assert "* Names of blocks are relative to base_model.model.\n" in text
    assert "base_model" not in printed(explanation(layers(3)))


@pytest.mark.parametrize("block", [f"base_model.model.model.{PEFT[2]}", "an_encoder.with.many.parts." * 3 + "layers.0"])
def test_no_name_is_broken_within(block: str) -> None:
    text = printed(explanation((replace(WIDE, block=block), replace(WIDE, block="other"))))
    names = {name for line in text.splitlines() for name in re.findall(r"\w+", line)}
    assert {*block.split("."), "selective", "matmul", "attention"} <= names


# ---- folding


def names(rows: Sequence[Row]) -> list[str]:
    return [row.block for row in group_rows(rows)]


def test_equal_layers_fold_to_sums() -> None:
    (row,) = group_rows(layers(12))
    assert row == replace(
        LAYER,
        block="transformer.h.0-11 (12x)",
        bytes_before=72 * MIB,
        bytes_after=6 * MIB,
        runs=12,
        reruns=12,
        forward_seconds=pytest.approx(0.012),
        recompute_seconds=pytest.approx(0.024),
    )


@pytest.mark.parametrize(
    "change",
    [{"rule": "keep"}, {"place": "host"}, {"bytes_after": 1}, {"note": "x"}, {"runs": 2}, {"bytes_before": 1}],
)
def test_a_layer_that_differs_stays_by_itself(change: dict[str, Any]) -> None:
    rows = list(layers(5))
    rows[2] = replace(rows[2], **change)
    assert names(rows) == ["transformer.h.0-1 (2x)", "transformer.h.2", "transformer.h.3-4 (2x)"]


PARTS = {"": "full", ".attn": "keep", ".mlp": "full"}


@pytest.mark.parametrize(
    ("rules", "folded"),
    [
        (
            {f"h.{i}{part}": rule for i in range(3) for part, rule in PARTS.items()} | {"norm": "full"},
            ["h.0-2 (3x)", "h.0-2.attn (3x)", "h.0-2.mlp (3x)", "norm"],
        ),
        ({f"h.{i}": "full" if i % 2 else "keep" for i in range(6)}, ["h.0,2,..,4 (3x)", "h.1,3,..,5 (3x)"]),
        ({f"h.{i}": "full" if i % 2 else "keep" for i in range(4)}, ["h.0,2 (2x)", "h.1,3 (2x)"]),
        (
            dict.fromkeys(("encoder.0", "encoder.1", "decoder.0", "decoder.1"), "full"),
            ["encoder.0-1 (2x)", "decoder.0-1 (2x)"],
        ),
    ],
    ids=["by period", "every other", "two of each", "two stacks"],
)
def test_layers_fold(rules: Any, folded: list[str]) -> None:
    assert names([replace(LAYER, block=block, rule=rule) for block, rule in rules.items()]) == folded


def test_a_nested_block_stays_with_its_layer_where_the_first_layer_differs() -> None:
    rows = [
        replace(LAYER, block=f"h.{i}{part}", bytes_before=(i > 0) + 2 * (part != ""))
        for i in range(3)
        for part in ("", ".mlp")
    ]
    assert names(rows) == ["h.0", "h.0.mlp", "h.1-2 (2x)", "h.1-2.mlp (2x)"]


ROWS = st.lists(
    st.builds(
        Row,
        block=st.builds("{}.{}{}".format, st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(("", ".x", ".1"))),
        rule=st.sampled_from(("keep", "full")),
        bytes_before=st.integers(0, 1),
        bytes_after=st.just(0),
        runs=st.just(1),
        reruns=st.just(0),
        forward_seconds=st.sampled_from((None, 1.0)),
    ),
    max_size=24,
)


@given(ROWS)
def test_folding_loses_nothing(rows: list[Row]) -> None:
    folded = list(group_rows(rows))
    for name in ("bytes_before", "runs", "forward_seconds"):
        assert sum(getattr(row, name) or 0 for row in folded) == sum(getattr(row, name) or 0 for row in rows)
    assert len(folded) <= len(rows)
    assert "total" in printed(explanation(rows))
