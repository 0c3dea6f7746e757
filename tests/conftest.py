"""Tests leave no caches beside the traces they read."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("STEPSCOPE_TRACE_CACHE", tempfile.mkdtemp(prefix="stepscope-test-traces-"))
