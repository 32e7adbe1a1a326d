"""Output of commands: tables, progress, Markdown, the interactive chat."""
