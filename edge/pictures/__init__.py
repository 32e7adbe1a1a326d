"""Draw results as PNG charts and HTML pages."""
