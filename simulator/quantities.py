"""Numbers with units, as people read them."""

from __future__ import annotations

GIB = 2**30

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def seconds_text(seconds: float) -> str:
    """Show a duration with three figures.

    >>> [seconds_text(s) for s in (0.0, 3.2e-6, 0.01234, 1.5, 300.0)]
    ['0 s', '3.20 µs', '12.3 ms', '1.50 s', '300 s']
    """
    return _scaled(seconds, _SECONDS)


def duration_text(seconds: float) -> str:
    """Show a duration that may be long, in the unit people use.

    >>> [duration_text(s) for s in (0.5, 90.0, 600.0, 11_000.0, 4.9e7, 1.8e9)]
    ['500 ms', '90.0 s', '10.0 min', '3.06 h', '567 days', '57.0 years']
    """
    for size, unit, least in (
        (365.25 * 86400, "years", 1000 * 86400),
        (86400.0, "days", 2 * 86400),
        (3600.0, "h", 7200),
        (60.0, "min", 300),
    ):
        if seconds >= least:
            return f"{_three_figures(seconds / size)} {unit}"
    return seconds_text(seconds)


def interval_text(low_s: float, high_s: float) -> str:
    """Show an interval of durations, in one unit where that reads well.

    >>> interval_text(0.08, 0.13), interval_text(0.9, 1.2), interval_text(1e-4, 1.0)
    ('80.0–130 ms', '0.90–1.20 s', '100 µs–1.00 s')
    """
    high, unit = seconds_text(high_s).split(" ")
    size = next((size for size, name in _SECONDS if name == unit), 1.0)
    if low_s / size < 0.1:
        return f"{seconds_text(low_s)}–{high} {unit}"
    return f"{_three_figures(low_s / size)}–{high} {unit}"


def bytes_text(size_bytes: float) -> str:
    """Show a size in binary units with three figures.

    >>> [bytes_text(b) for b in (0, 2, 1536, 80 * 2**30)]
    ['0 B', '2 B', '1.50 KiB', '80.0 GiB']
    """
    if abs(size_bytes) < 1000:
        return f"{size_bytes:.0f} B"
    return _scaled(size_bytes, ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))


def rate_text(per_second: float, what: str) -> str:
    """Show a throughput.

    >>> rate_text(123456.0, "tokens")
    '123 k tokens/s'
    """
    return _scaled(per_second, ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))).rstrip() + f" {what}/s"


def percent_text(fraction: float) -> str:
    """Show a fraction as per cent.

    >>> [percent_text(f) for f in (0.0, 0.0004, 0.123, 1.0)]
    ['0 %', '0.04 %', '12.3 %', '100 %']
    """
    return f"{_three_figures(100 * fraction)} %" if fraction else "0 %"


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return f"0 {next(unit for size, unit in units if size == 1.0)}"
    size, unit = next((pair for pair in units if abs(value) >= 0.9995 * pair[0]), units[-1])
    return f"{_three_figures(value / size)} {unit}"


def _three_figures(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"
