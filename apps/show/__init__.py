"""Tables, progress, Markdown and pictures."""
