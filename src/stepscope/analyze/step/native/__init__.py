"""The passes over rows and over the work of a device, compiled."""

from __future__ import annotations

from stepscope.analyze.step import gap_loops, row_passes
from stepscope.formats.machine_code import compiled

survey_rows = compiled(row_passes.survey_rows)
find_touching = compiled(row_passes.find_touching)
follow_streams = compiled(row_passes.follow_streams)
survey_launches = compiled(gap_loops.survey_launches)
sum_gaps = compiled(gap_loops.sum_gaps)
