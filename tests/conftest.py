"""Hypothesis: new examples on every run at a desk, the same ones on every run in CI."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
