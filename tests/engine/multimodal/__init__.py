"""Tests of pictures and sounds in prompts."""
