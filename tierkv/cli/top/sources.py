"""Sources of samples: a port that serves metrics, and the record of a stack."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prometheus_client.parser import text_string_to_metric_families

from tierkv.abc.places import exists
from tierkv.errors import ConfigError
from tierkv.metrics.definitions import GAUGES, HISTOGRAMS, counters
from tierkv.metrics.deltas import Delta, empty_delta, merge
from tierkv.metrics.serving import PORT_MAX
from tierkv.recording.entries import Entry, opened_at_s
from tierkv.recording.reading import entries_so_far, files_of

Values = Mapping[str, Mapping[str, float]]
"""Exported name of a series -> its tier, or its other own label, or "" -> value. Histograms: their sum and count."""

ANSWER_BYTES_MAX = 64 * 2**20
PIECE_BYTES = 64 << 10
TIMEOUT_S = 5.0
_PREFIX = "tierkv_"
_OWN = tuple({label: None for metric in (*counters(), *GAUGES, *HISTOGRAMS) for label in metric.labels})


@dataclass(frozen=True, slots=True)
class Sample:
    """Metrics of the stacks of one source at one time."""

    at_s: float
    """Wall clock."""
    stacks: Mapping[str, Values]
    """By the constant labels of a stack, as text; "" for the only one."""


class NoSampleError(Exception):
    """The source gives no sample; the message says why."""


class Source(Protocol):
    """Source of samples."""

    name: str
    """Address or path, as it is shown."""

    def read(self) -> list[Sample]:
        """Return the samples since the last call, oldest first.

        Raises:
            NoSampleError: the source does not answer, or answers something else.
        """


def source_of(target: str) -> Source:
    """Return the source that a user names: an address, a port, or the path of a record.

    Raises:
        ConfigError: there is no such record, and it is no address.
    """
    if target.startswith(("http://", "https://")):
        return MetricsPort(target if re.search(r"://[^/]+/.", target) else f"{target.rstrip('/')}/metrics")
    found = re.fullmatch(r"(?:([\w.-]+|\[[0-9a-fA-F:]+\])?:)?(\d{1,5})", target)
    if found and not exists(Path(target)):
        if not 0 < int(found[2]) <= PORT_MAX:
            raise ConfigError(f"{target}: a port is a number from 1 to {PORT_MAX}")
        return MetricsPort(f"http://{found[1] or '127.0.0.1'}:{found[2]}/metrics")
    if "://" in target or target.startswith(":"):
        raise ConfigError(f"{target}: this is no address of metrics; give one such as :9400 or http://127.0.0.1:8000")
    try:
        files_of(Path(target))
    except ConfigError as error:
        raise ConfigError(f"{error}; an address has a port, such as localhost:9400") from error
    return RecordFile(Path(target))


class MetricsPort:
    """Address that serves metrics in the format of Prometheus: ``tierkv.serve_metrics``, or vLLM's ``/metrics``."""

    def __init__(self, url: str) -> None:
        self.name = url

    def read(self) -> list[Sample]:
        """Ask for the metrics once. Raises as :meth:`Source.read`."""
        text = self._text()
        lines = [line for line in text.splitlines() if line.startswith(_PREFIX)]
        if not lines:
            raise NoSampleError(f"{self.name} answers, but {_what_it_is(text)}")
        try:
            return [Sample(time.time(), dict(_by_stack("\n".join(lines))))]
        except ValueError as error:
            raise NoSampleError(f"{self.name} answers, but not in the format of Prometheus: {error}") from error

    def _text(self) -> str:
        try:
            with urllib.request.urlopen(self.name, timeout=TIMEOUT_S) as answer:  # noqa: S310 - http, by source_of
                body = _body(answer)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            hint = "; the metrics of most programs are at /metrics" if error.code == http.HTTPStatus.NOT_FOUND else ""
            raise NoSampleError(f"{self.name} answers {error.code} {error.reason}{hint}") from error
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            hint = "does the engine run, and serve its metrics there?"
            raise NoSampleError(f"{self.name} does not answer: {reason}; {hint}") from error
        return body.decode(errors="replace")


def _body(answer: http.client.HTTPResponse) -> bytes:
    """Read an answer to its end, in bounded time.

    Raises:
        TimeoutError: it does not end.
        IncompleteRead: it ends early.
    """
    end_s, body = time.monotonic() + TIMEOUT_S, bytearray()
    while len(body) < ANSWER_BYTES_MAX:
        piece = answer.read1(PIECE_BYTES)
        if not piece and answer.length:
            raise http.client.IncompleteRead(bytes(body), answer.length)
        if not piece:
            break
        body += piece
        if time.monotonic() > end_s:
            raise TimeoutError(f"its answer does not end within {TIMEOUT_S:g} s")
    return bytes(body)


def _what_it_is(text: str) -> str:
    if text.lstrip()[:1] == "<":
        return "with a web page; is this the port of the metrics, and the path /metrics?"
    if "# TYPE" in text:
        return "without metrics of tierkv; is a stack open in that program?"
    return "not with metrics; give the port that tierkv.serve_metrics or vLLM serves"


def _by_stack(text: str) -> Iterator[tuple[str, Values]]:
    """Yield the values of each stack: of each set of labels that are not the metric's own."""
    stacks: dict[str, dict[str, dict[str, float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or not math.isfinite(sample.value):
                continue
            own = next((sample.labels[name] for name in _OWN if name in sample.labels), "")
            others = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name not in _OWN]
            stacks.setdefault(" ".join(others), {}).setdefault(sample.name, {})[own] = sample.value
    yield from stacks.items()


class RecordFile:
    """Record of a stack, also while it is written: its entries of metrics, added up."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._entries = entries_so_far(path)
        self._head: Entry = {}
        self._sums: Delta = empty_delta()
        self._opened_s = 0.0

    def read(self) -> list[Sample]:
        """Read what was written since the last call. Raises as :meth:`Source.read`."""
        samples: list[Sample] = []
        for entry in self._entries:
            if entry is None:
                break
            if entry["is"] == "record" and entry != self._head:
                self._begin(entry)
            elif entry["is"] == "metrics":
                grown = Delta(counters=entry["counters"], gauges=entry["gauges"], histograms=entry["histograms"])
                try:
                    merge(self._sums, grown)
                except ValueError:  # another number of buckets: the line is damaged
                    continue
                samples.append(Sample(self._opened_s + entry["t"], {"": _values(self._sums)}))
        return samples

    def _begin(self, head: Entry) -> None:
        """Begin with the first entry of another process."""
        self._head, self._sums = head, empty_delta()
        opened_s = opened_at_s(head)
        if opened_s is None:
            raise ConfigError(f"{self.name}: this is no record of a stack: its first line has no time")
        self._opened_s = opened_s


def _values(sums: Delta) -> Values:
    values: dict[str, Mapping[str, float]] = {f"{name}_total": dict(row) for name, row in sums["counters"].items()}
    values.update({name: dict(row) for name, row in sums["gauges"].items()})
    for name, rows in sums["histograms"].items():
        values[f"{name}_sum"] = {label: row[-1] for label, row in rows.items()}
        values[f"{name}_count"] = {label: sum(row[:-1]) for label, row in rows.items()}
    return values
