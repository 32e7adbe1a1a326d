"""The text of prompts and answers: templates, constraints, thoughts, and limits on endless answers."""
