"""The executor: plan → cases → ranks or processes → journal → finished run."""
