"""Bytes and seconds as people write them. Numbers and text only, no torch."""

from __future__ import annotations

import re

_STEP = 1024
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_BYTES_OF: dict[str, int] = {
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)},
    **{unit.lower(): _STEP**power for power, unit in enumerate(_BINARY)},
}
_MOST_BYTES = 2**64
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")


def _three_digits(value: float) -> str:
    """Prints ``value`` (0 or more) with three significant digits and no exponent.

    >>> _three_digits(1.5), _three_digits(9.996), _three_digits(12), _three_digits(1023.4)
    ('1.50', '10.0', '12.0', '1023')
    """
    for digits, limit in ((2, 10.0), (1, 100.0)):
        if round(value, digits) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"


def format_bytes(num_bytes: int) -> str:
    """Prints a number of bytes with three significant digits in the largest binary unit that fits.

    Three digits err by at most 0.5 %; below 1 KiB the number is exact. A difference may be negative.

    >>> format_bytes(640), format_bytes(12 * 2**20), format_bytes(3 * 2**29)
    ('640 B', '12.0 MiB', '1.50 GiB')
    >>> format_bytes(2**20 - 1), format_bytes(-2048)
    ('1.00 MiB', '-2.00 KiB')
    """
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    if size < _STEP:
        return f"{sign}{size} B"
    power = 1
    while power < len(_BINARY) - 1 and round(size / _STEP**power) >= _STEP:
        power += 1  # rounded, so that one byte below 1 MiB is not "1024 KiB"
    return f"{sign}{_three_digits(size / _STEP**power)} {_BINARY[power]}"


def at_least(num_bytes: int) -> str:
    """Prints a size to type, which is rounded up: :func:`parse_bytes` reads at least ``num_bytes`` from it.

    >>> at_least(640), at_least(12 * 2**20), at_least(12 * 2**20 + 1), at_least(2**30 - 1)
    ('640', '12.0MiB', '12.1MiB', '1.00GiB')
    """
    if num_bytes < _STEP:
        return str(num_bytes)
    size = format_bytes(num_bytes).replace(" ", "")
    if parse_bytes(size) >= num_bytes:
        return size
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", size).groups()  # type: ignore[union-attr]
    digits = len(number.partition(".")[2])
    return f"{float(number) + 10**-digits:.{digits}f}{unit}"


def format_sizes(*sizes: int) -> list[str]:
    """Prints sizes that a reader will compare: in bytes if :func:`format_bytes` prints two different ones alike.

    >>> format_sizes(3 * 2**29, 2**20), format_sizes(2**20, 2**20), format_sizes(2**20, 2**20 + 9)
    (['1.50 GiB', '1.00 MiB'], ['1.00 MiB', '1.00 MiB'], ['1048576 B', '1048585 B'])
    """
    texts = [format_bytes(size) for size in sizes]
    return texts if len(set(texts)) == len(set(sizes)) else [f"{size} B" for size in sizes]


def parse_bytes(size: str | int) -> int:
    """Reads a size such as ``"12GiB"`` and returns bytes; an ``int`` is bytes already.

    ``KiB, MiB, GiB, ...`` are powers of 1024, ``KB, MB, GB, ...`` powers of 1000, in any case of letters.
    A fraction of a byte is dropped.

    Raises:
        ValueError: ``size`` is negative, more than 16 EiB, not a number with a unit, or its unit is unknown.

    >>> parse_bytes("12GiB") == 12 * 2**30, parse_bytes("1.5 kb"), parse_bytes("640"), parse_bytes(640)
    (True, 1500, 640, 640)
    >>> parse_bytes("12 G")
    Traceback (most recent call last):
    ValueError: memory size '12 G': unknown unit 'G' · fix: use 'GiB' (powers of 1024) or 'GB' (powers of 1000)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise ValueError(f"expected 0 or more bytes, got {size} · fix: write a size such as '12GiB'")
        return _checked_size(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"{size!r} is not a memory size · fix: write one such as '12GiB'")
    number, unit = match.groups()
    factor = _BYTES_OF.get((unit or "B").lower())
    if factor is None:
        letter = unit[0].upper() if unit[0].upper() in "KMGTPE" else "G"
        fix = f"use '{letter}iB' (powers of 1024) or '{letter}B' (powers of 1000)"
        raise ValueError(f"memory size {size!r}: unknown unit {unit!r} · fix: {fix}")
    integer, _, fraction = number.partition(".")
    if len(integer.lstrip("0")) > len(str(_MOST_BYTES)):  # int() refuses more than 4300 digits
        return _checked_size(_MOST_BYTES + 1)
    digits = int((integer or "0") + fraction)  # integers throughout: a float loses bytes above 8 PiB
    scale: int = 10 ** len(fraction)
    return _checked_size(digits * factor // scale)


def _checked_size(num_bytes: int) -> int:
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"expected at most {format_bytes(_MOST_BYTES)}, got more · fix: write a size such as '12GiB'")
    return num_bytes


def format_seconds(seconds: float) -> str:
    """Prints a duration in seconds with three significant digits, in the unit that reads best.

    >>> format_seconds(0.00042), format_seconds(0.0123), format_seconds(1.5), format_seconds(200)
    ('420 us', '12.3 ms', '1.50 s', '3 min 20 s')
    >>> format_seconds(0), format_seconds(2.5e-7), format_seconds(7384)
    ('0 s', '250 ns', '2 h 3 min')
    """
    if seconds == 0:
        return "0 s"
    sign = "-" if seconds < 0 else ""
    size = abs(seconds)
    if round(size) >= 3600:
        hours, minutes = divmod(round(size / 60), 60)
        return f"{sign}{hours} h {minutes} min"
    if round(size) >= 60:
        minutes, rest = divmod(round(size), 60)
        return f"{sign}{minutes} min {rest} s"
    for unit, factor in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if round(size * factor) < 1000:
            return f"{sign}{_three_digits(size * factor)} {unit}"
    return f"{sign}{_three_digits(size)} s"


def format_rate(per_second: float) -> str:
    """Prints a number of samples per second with three significant digits.

    >>> format_rate(7.12345), format_rate(1234.5)
    ('7.12', '1234')
    """
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"
