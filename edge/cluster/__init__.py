"""The owner's side: workers reached, sessions on them, and plans deployed there."""
