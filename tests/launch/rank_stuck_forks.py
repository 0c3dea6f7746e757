"""A worker whose module lets every fork stand still, as a lock that another thread held would; for test_local."""

from __future__ import annotations

import os
import time

import rank_deaths

from stepscope.launch import RankSession

os.register_at_fork(after_in_child=lambda: time.sleep(600))


def tell_whose_child(session: RankSession) -> None:
    rank_deaths.tell_whose_child(session)
