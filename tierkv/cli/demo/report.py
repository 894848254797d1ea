"""Report of the demo: JSON, tables, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.text import Text

from tierkv.cli.demo.phases import PhaseResult, Served
from tierkv.cli.output import BAD, GOOD, console, print_table
from tierkv.reference.configs import EngineConfig
from tierkv.types.sizes import round_size


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Comparison of all three phases."""

    engine: EngineConfig
    plain: PhaseResult
    fill: PhaseResult
    again: PhaseResult
    frames_damaged: int
    """Number of frames that ``--corrupt`` changed; 0 without it."""
    corrupt: bool

    @property
    def differing(self) -> list[str]:
        """Requests whose tokens differ from the run without tierkv."""
        expected = {(s.conversation, s.turn): s.answer for s in self.plain.served}
        return [
            f"{s.conversation} turn {s.turn}"
            for s in (*self.fill.served, *self.again.served)
            if s.answer != expected[s.conversation, s.turn]
        ]

    @property
    def problems(self) -> list[str]:
        """Failures of the demo; empty if it succeeded."""
        found = [f"tokens differ: {', '.join(self.differing)}"] if self.differing else []
        if not self.fill.flushed:
            found.append("some stored chunks were not written to the lower tiers")
        if not sum(self.again.counters["tokens_loaded"].values()):
            found.append("the new process loaded nothing from the tiers")
        if self.corrupt and not self._corrupt_chunks():
            found.append("corrupt frames were not detected")
        return found

    def _corrupt_chunks(self) -> int:
        return sum(sum(phase.counters["chunks_corrupt"].values()) for phase in (self.fill, self.again))

    def _cold(self) -> dict[str, Served]:
        last = max(s.turn for s in self.plain.served)
        return {s.conversation: s for s in self.plain.served if s.turn == last}

    def as_json(self) -> dict[str, Any]:
        """Return the report as one object."""
        cold = self._cold()
        phases = (self.fill, self.again)
        counts = [phase.counters["tokens_loaded"] for phase in phases]
        order = dict.fromkeys(("host", *self.again.tiers, *(tier for count in counts for tier in count)))
        loaded = {tier: sum(count.get(tier, 0) for count in counts) for tier in order if any(tier in c for c in counts)}
        return {
            "tokens_equal": not self.differing,
            "tokens_computed": sum(s.tokens_computed for phase in phases for s in phase.served),
            "tokens_computed_without_tierkv": sum(s.tokens_computed for s in self.plain.served),
            "tokens_loaded": loaded,
            "chunks_corrupt": self._corrupt_chunks(),
            "deferrals": sum(phase.counters["deferrals"] for phase in phases),
            "bytes_verified": sum(
                phase.bytes_loaded + sum(tier["bytes_verified"] for tier in phase.tiers.values()) for phase in phases
            ),
            "ttft_cold_s": median(s.ttft_s for s in cold.values()),
            "ttft_warm_s": median(s.ttft_s for s in self.again.served),
            "engine": {
                "model": self.engine.model.name,
                "tensor_parallel": self.engine.tensor_parallel,
                "windows": list(self.engine.windows),
            },
            "frames_damaged": self.frames_damaged,
            "problems": self.problems,
            "phases": {
                phase.name: {
                    "pid": phase.pid,
                    "worker_pids": phase.worker_pids,
                    "counters": phase.counters,
                    "tiers": phase.tiers,
                    "bytes_stored": phase.bytes_stored,
                    "bytes_loaded": phase.bytes_loaded,
                }
                for phase in phases
            },
            "requests": [
                {
                    "conversation": s.conversation,
                    "prompt_tokens": s.prompt_tokens,
                    "tokens_computed": s.tokens_computed,
                    "tokens_loaded": s.loaded_by_tier,
                    "tokens_cached": s.tokens_cached,
                    "deferrals": s.deferrals,
                    "ttft_cold_s": cold[s.conversation].ttft_s,
                    "ttft_warm_s": s.ttft_s,
                    "tokens_equal": s.answer == cold[s.conversation].answer,
                }
                for s in self.again.served
            ],
        }

    def print(self) -> None:
        """Two tables and a verdict."""
        report = self.as_json()
        tiers = list(report["tokens_loaded"])
        print_table(
            "Returning conversations, in a new process",
            ["conversation", "prompt", "computed", *(f"from {t}" for t in tiers), "GPU cache", "deferrals",
             "cold ms", "warm ms", "tokens"],
            [
                [r["conversation"], str(r["prompt_tokens"]), str(r["tokens_computed"]),
                 *(str(r["tokens_loaded"].get(t, 0)) for t in tiers), str(r["tokens_cached"]), str(r["deferrals"]),
                 f"{r['ttft_cold_s'] * 1e3:.0f}", f"{r['ttft_warm_s'] * 1e3:.0f}",
                 Text("equal", GOOD) if r["tokens_equal"] else Text("DIFFER", BAD)]
                for r in report["requests"]
            ],
        )  # fmt: skip
        print_table(
            "Both processes together",
            ["what", "how much"],
            [
                ["tokens computed (without tierkv)",
                 f"{report['tokens_computed']} ({report['tokens_computed_without_tierkv']})"],
                *([f"tokens loaded from {t}", str(n)] for t, n in report["tokens_loaded"].items()),
                ["time to first token, returning: cold, warm (median)",
                 f"{report['ttft_cold_s'] * 1e3:.0f} ms, {report['ttft_warm_s'] * 1e3:.0f} ms"],
                *([f"{tier}: written, read, verified",
                   ", ".join(round_size(sum(p["tiers"][tier][key] for p in report["phases"].values()))
                             for key in ("bytes_written", "bytes_read", "bytes_verified"))]
                  for tier in self.again.tiers),
                ["GPU to host, host to GPU",
                 ", ".join(round_size(sum(p[key] for p in report["phases"].values()))
                           for key in ("bytes_stored", "bytes_loaded"))],
                ["bytes verified", round_size(report["bytes_verified"])],
                ["deferrals", str(report["deferrals"])],
                ["frames corrupted, chunks detected", f"{self.frames_damaged}, {report['chunks_corrupt']}"],
            ],
        )  # fmt: skip
        out = console()
        for problem in self.problems:
            out.print(Text(problem, BAD))
        if not self.problems:
            out.print(Text("Every generated token equals the run without tierkv.", GOOD))
