"""Metrics as values: each has a kind, is merged exactly, and is averaged only when it is written."""

from async_rl.metrics.catalogue import CATALOGUE, Row, find_row
from async_rl.metrics.sinks import Sink, open_sinks
from async_rl.metrics.values import Metrics

__all__ = ["CATALOGUE", "Metrics", "Row", "Sink", "find_row", "open_sinks"]
