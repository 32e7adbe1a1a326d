"""Several tokens in one pass: guesses at what comes next, and whether checking them pays."""
