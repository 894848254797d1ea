from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.config.units import SIZE_BYTES_MAX, format_size, parse_size
from tierkv.types.sizes import round_size


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("500MB", 500_000_000),
        ("8GiB", 8 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 2 KiB ", 2048),
        ("0.1GB", 100_000_000),
        ("1.0001KB", 1000),
        ("7PiB", 7 * 2**50),
    ],
)
def test_sizes_that_people_write(written: object, size: int) -> None:
    """Binary and decimal units must not be mixed up, and a fraction must not pass through a float."""
    assert parse_size(written) == size


@pytest.mark.parametrize("written", [0, -1, "0", "0GiB", "-8GiB", "0.4B"])
def test_sizes_below_one_byte_are_refused(written: object) -> None:
    """A tier of no or negative size would evict for ever."""
    with pytest.raises(ValueError, match="at least 1 byte"):
        parse_size(written)


@pytest.mark.parametrize(
    "written", ["", "GiB", "8 8", "1e9", "8GiB8", "٣GiB", 1.5, True, None, [], "1..5GiB", "1" * 40]
)
def test_what_is_no_size_is_refused_with_what_is_one(written: object) -> None:
    """The error for a wrong form must show the right form."""
    with pytest.raises(ValueError, match=r"not a size; write .*\"8GiB\"; units: B, KB.*PiB"):
        parse_size(written)


def test_an_unknown_unit_is_named_with_its_neighbour() -> None:
    """`GiB`, `Gib` and `gb` mean three things to three people; guessing would be 7 % or a factor of 8 off."""
    with pytest.raises(ValueError, match=r"unknown unit 'Gib'; did you mean GiB\?; write .*units: B, KB"):
        parse_size("8Gib")
    for unit in ("g", "G", "Gi"):  # of other programs
        with pytest.raises(ValueError, match=rf"unknown unit '{unit}'; did you mean GiB\?"):
            parse_size(f"10{unit}")
    with pytest.raises(ValueError, match=r"unknown unit 'parsec'; write"):
        parse_size("8 parsec")


def test_a_fraction_needs_a_unit() -> None:
    """`1.5` bytes is a forgotten unit."""
    with pytest.raises(ValueError, match="a fraction needs a unit"):
        parse_size("1.5")


def test_a_size_has_a_bound() -> None:
    """Sizes go into 64-bit fields; a larger one must be reported here."""
    assert parse_size(2**63 - 1) == SIZE_BYTES_MAX
    with pytest.raises(ValueError, match="at most"):
        parse_size(2**63)
    with pytest.raises(ValueError, match="at most"):
        parse_size("9000000PiB")


@given(st.one_of(st.integers(1, SIZE_BYTES_MAX), st.integers(1, 2**20).map(lambda n: n * 2**20)))
def test_formatting_loses_nothing(size: int) -> None:
    """A size that a message shows can be pasted back into the file."""
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 9999), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_a_unit_is_its_factor(number: int, unit: str) -> None:
    """A number with a unit is that many times the unit, with and without a space."""
    assert parse_size(f"{number}{unit}") == parse_size(f"{number} {unit}") == number * parse_size(f"1{unit}")


@pytest.mark.parametrize(
    ("size", "exact", "rounded"),
    [
        (0, "0B", "0 B"),
        (1023, "1023B", "1023 B"),
        (2**30, "1GiB", "1.00 GiB"),
        (3 * 2**29, "1.5GiB", "1.50 GiB"),
        (1000 * 2**20, "1000MiB", "1000 MiB"),
        (1000 * 2**30, "1000GiB", "1000 GiB"),
        (123_456_789, "123456789B", "118 MiB"),
    ],
)
def test_sizes_are_shown_briefly(size: int, exact: str, rounded: str) -> None:
    """Tables need short sizes, and no trailing zero may be lost from a round thousand."""
    assert (format_size(size), round_size(size)) == (exact, rounded)
