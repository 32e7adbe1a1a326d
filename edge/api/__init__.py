"""The Python API behind `import edge`. The commands and the server use it, too."""
