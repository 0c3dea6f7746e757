"""A whole job: every rank's step explained, wherever the ranks' traces are analysed."""

from stepscope.analyze.job.report import JobReport, RankSummary, Timelines, explain_job
from stepscope.analyze.job.steps import StepTime

__all__ = ["JobReport", "RankSummary", "StepTime", "Timelines", "explain_job"]
