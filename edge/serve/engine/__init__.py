"""The engine process: computes the requests of one served model."""
