"""Keys and values of prompts, kept on disk: names, encrypted blocks, and the folder that they lie in."""
