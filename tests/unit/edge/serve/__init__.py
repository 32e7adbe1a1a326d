"""Tests of parts of the server without processes."""
