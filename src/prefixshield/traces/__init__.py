"""Requests as data: reading, writing and generating traces."""

from prefixshield.traces.reader import TraceRequest, read_trace
from prefixshield.traces.workload import Workload
from prefixshield.traces.writer import write_trace

__all__ = ["TraceRequest", "Workload", "read_trace", "write_trace"]
