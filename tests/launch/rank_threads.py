"""A worker whose module starts a thread when it is imported, as some libraries do; for test_local."""

from __future__ import annotations

import threading

import rank_deaths

from stepscope.launch import RankSession

threading.Thread(target=threading.Event().wait, daemon=True).start()


def tell_whose_child(session: RankSession) -> None:
    rank_deaths.tell_whose_child(session)
