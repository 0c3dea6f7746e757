"""Tests leave no caches beside the traces they read, and none of them fails because a machine is busy."""

from __future__ import annotations

import os
import tempfile

from hypothesis import settings

os.environ.setdefault("STEPSCOPE_TRACE_CACHE", tempfile.mkdtemp(prefix="stepscope-test-traces-"))
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
