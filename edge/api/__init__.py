"""The Python API: what `import edge` offers, made of the rooms above. Nothing else in edge imports it."""
