"""A whole job: every rank's step explained, wherever the ranks' traces are analysed."""

from stepscope.analyze.job.report import JobReport, JobStep, Timelines, explain_job
from stepscope.analyze.job.tasks import RankSummary

__all__ = ["JobReport", "JobStep", "RankSummary", "Timelines", "explain_job"]
