"""Stored runs made readable: one view model, rendered as text, Markdown, CSV, JSON and one offline HTML page."""
