"""Cost model of plans: time, memory, bytes and energy, predicted from measurements."""
