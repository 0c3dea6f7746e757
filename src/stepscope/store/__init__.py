"""Run folders: journal, resume, hashes, index and SQL."""
