"""Request traces in the serial-replay format (policy.md section 10)."""

from prefixshield.traces.reader import TraceRequest, read_trace

__all__ = ["TraceRequest", "read_trace"]
