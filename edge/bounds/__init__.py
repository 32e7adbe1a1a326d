"""What ends answers that would go on for ever."""
