"""The I/O shell: the only owner of threads and event loops. Performs tier operations; decides nothing."""

from __future__ import annotations

from tierkv.dispatch.copy_pool import CopyPool
from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.scanning import ScanResult
from tierkv.dispatch.stats import DispatchStats, TierStats
from tierkv.dispatch.tier_state import TierLimits

__all__ = ["CopyPool", "DispatchStats", "Dispatcher", "ScanResult", "TierLimits", "TierStats"]
