"""The Python API: what `import edge` offers, made of the rooms above. Commands and the server are written on it."""
