"""Any answer of a port: figures on the screen, or a word that these are no metrics."""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

from parser_inputs import any_bytes, parser_test
from rich.console import Console

from tierkv.cli.top.command import Watch
from tierkv.cli.top.screen import whole_screen
from tierkv.cli.top.sources import MetricsPort

HERE = Path(__file__).parent
METRICS = b"""# HELP tierkv_lookups_total Lookups
# TYPE tierkv_lookups_total counter
tierkv_lookups_total{engine="0"} 12.0
tierkv_tier_usable{engine="0",tier="disk"} 1.0
tierkv_tier_writable{engine="0",tier="disk"} 0
tierkv_tier_chunks{engine="0",tier="disk"} 1.5e3
tierkv_tier_corrupt_total{engine="0",tier="disk"} 4
tierkv_transfer_bytes_sum{engine="0",transfer_type="load"} 9 1700000000000
"""


@parser_test(HERE / "corpus" / "metrics", any_bytes([METRICS, METRICS.replace(b"12.0", b"NaN"), b"<html>"]), share=2)
def test_any_answer_is_shown_or_named(data: bytes) -> None:
    """A port may be that of another program, or of one that writes its figures in another way."""
    watch = Watch(MetricsPort("http://127.0.0.1:1/metrics"))
    for text in (METRICS.decode(), data.decode(errors="replace"), METRICS.decode()):
        with mock.patch.object(MetricsPort, "_text", return_value=text):
            watch.look()
        terminal = Console(width=80, file=io.StringIO())
        terminal.print(whole_screen("here", watch.stacks, watch.changes.latest(10), watch.note, 80))
