"""The plugin as tierkv finds it: entry point, version, options."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

import tierkv_disk
from tierkv.abc import SPI_VERSION
from tierkv_disk import DiskOptions


def test_entry_point() -> None:
    """`pip install tierkv-disk`, write `backend = "disk"`: this line is what connects the two."""
    (point,) = entry_points(group="tierkv", name="disk")
    assert point.load() is tierkv_disk
    assert tierkv_disk.TIERKV_SPI == SPI_VERSION
    assert list(tierkv_disk.tierkv_backends()) == [tierkv_disk.PLUGIN]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "path is empty"),
        ({"path": "x", "durability": "often"}, "durability = 'often' is not one of 'none', 'batch', 'always'"),
        ({"path": "x", "direct_io": "yes"}, "direct_io = 'yes' is not one of 'auto', 'on', 'off'"),
        ({"path": "x", "min_free_bytes": -1}, "min_free_bytes = -1 is negative"),
        ({"path": "x", "segment_bytes": 1000}, "segment_bytes = 1000 is below 1 MiB"),
    ],
)
def test_options_say_what_is_wrong(options: dict[str, str], message: str) -> None:
    """The framework puts file and key path before this text; key, value and what is allowed come from here."""
    with pytest.raises(ValueError, match=message):
        DiskOptions(**options)
