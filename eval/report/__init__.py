"""The report: HTML, Markdown and tables from result.json."""
