"""State without I/O: who is alive, what is in flight, what happened."""
