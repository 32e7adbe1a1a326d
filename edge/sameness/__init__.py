"""Agreement of routes: how near to each other the ways to compute one model are."""
