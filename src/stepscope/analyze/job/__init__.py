"""A whole job: every rank's step explained, wherever the ranks' traces are analysed."""

from stepscope.analyze.job.report import JobReport, RankSummary, StepTime, Timelines, explain_job

__all__ = ["JobReport", "RankSummary", "StepTime", "Timelines", "explain_job"]
