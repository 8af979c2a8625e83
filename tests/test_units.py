"""Bytes and seconds: examples first, then the round trip over all sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphckpt.units import format_bytes, format_seconds, format_sizes, parse_bytes

SIZES = st.integers(min_value=0, max_value=2**63)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (640, "640 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (12 * 2**20, "12.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (-640, "-640 B"),
        (2**70, "1024 EiB"),
    ],
)
def test_bytes_are_printed_in_the_largest_unit_that_fits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12GiB", 12 * 2**30),
        (" 12 gib ", 12 * 2**30),
        ("12GB", 12 * 10**9),
        (".5 KiB", 512),
        ("3.", 3),
        ("640", 640),
        (640, 640),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: int | str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12G", r"unknown unit 'G' · fix: use 'GiB' .* or 'GB'"),
        ("5 m", r"fix: use 'MiB'"),
        ("12 apples", r"unknown unit 'apples' · fix: use 'GiB'"),
        ("much", r"'much' is not a memory size · fix: write one such as '12GiB'"),
        ("-5 GiB", r"is not a memory size"),
        ("", r"is not a memory size"),
        (-1, r"expected 0 or more bytes, got -1"),
        (True, r"True is not a memory size"),
        (1.5, r"1.5 is not a memory size"),
        (10**400, r"expected at most 16.0 EiB, got more"),
        ("9" * 400 + "GiB", r"expected at most 16.0 EiB, got more"),
        ("9" * 5000, r"expected at most 16.0 EiB, got more"),
        ("17EiB", r"expected at most 16.0 EiB, got more"),
    ],
)
def test_a_wrong_size_says_what_to_write(text: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


@given(SIZES)
def test_printed_bytes_read_back_within_half_a_percent(num_bytes: int) -> None:
    again = parse_bytes(format_bytes(num_bytes))
    assert abs(again - num_bytes) <= 0.005 * num_bytes + 1  # parsing drops a fraction of a byte
    assert parse_bytes(f"{num_bytes} B") == num_bytes


@given(SIZES)
def test_bytes_read_from_text_print_as_the_same_text(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert format_bytes(parse_bytes(text)) == text


@given(SIZES, SIZES | st.just(0))
@example(1153433, 1153434)
def test_two_sizes_print_alike_only_if_they_are_equal(one: int, other: int) -> None:
    texts = format_sizes(one, other)
    assert (texts[0] == texts[1]) == (one == other)
    assert all(abs(parse_bytes(text) - size) <= size / 200 + 1 for text, size in zip(texts, (one, other), strict=True))


@given(SIZES)
def test_a_negative_size_differs_only_in_its_sign(num_bytes: int) -> None:
    assert format_bytes(-num_bytes) == ("-" if num_bytes else "") + format_bytes(num_bytes)


@given(st.floats(min_value=1e-9, max_value=1e6))
def test_seconds_have_at_most_four_digits_before_the_point(seconds: float) -> None:
    text = format_seconds(seconds)
    assert len(text.split()[0].split(".")[0]) <= 3
    assert format_seconds(-seconds) == "-" + text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9999, "1.00 s"), (0.00042, "420 us"), (59.6, "1 min 0 s"), (59.4, "59.4 s"), (3599.7, "1 h 0 min")],
)
def test_seconds_roll_over_to_the_next_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
