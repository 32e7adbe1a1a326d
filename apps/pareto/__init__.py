"""The Pareto front, shown: as a table, a picture and a page."""
