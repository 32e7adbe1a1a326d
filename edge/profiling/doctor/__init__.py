"""Diagnosis of this device, its workers and their links, with advice."""
