"""What a plan takes: time, memory, bytes and energy, predicted from measurements."""
