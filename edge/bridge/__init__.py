"""The bridge between browsers and the other devices: it serves a page, and a worker for each page that computes."""
