"""Holds the loading of data."""

from . import data as data
