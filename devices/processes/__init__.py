"""Processes of this project's own modules: how they are started, and forked."""
