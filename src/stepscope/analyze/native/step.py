"""The passes over rows and over the work of a device, compiled."""

from __future__ import annotations

from stepscope.analyze.step import idle_loops, row_loops
from stepscope.formats.machine_code import compiled

survey_rows = compiled(row_loops.survey_rows)
find_touching = compiled(row_loops.find_touching)
follow_streams = compiled(row_loops.follow_streams)
survey_launches = compiled(idle_loops.survey_launches)
sum_gaps = compiled(idle_loops.sum_gaps)
