"""Agreement of routes: how much predictions differ between the ways to compute one model."""
