"""Values of options that click does not check by itself."""

from __future__ import annotations

import math
from typing import cast

import click


class WholeRange(click.IntRange):
    """A count. What is no integer is refused in words that say what to write."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the number."""
        try:
            int(cast("str", value))
        except ValueError:
            self.fail(f"{value!r} is no whole number; write it in digits, such as 4", param, ctx)
        return int(super().convert(cast("int", value), param, ctx))


class FiniteRange(click.FloatRange):
    """A number in a range. Neither `nan`, which every range lets pass, nor `inf`."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number."""
        try:
            float(cast("str", value))
        except ValueError:
            self.fail(f"{value!r} is no number; write it without a unit, such as 2000 or 0.5", param, ctx)
        number = float(super().convert(cast("float", value), param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r}: give a finite number", param, ctx)
        return number
