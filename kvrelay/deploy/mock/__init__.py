"""Mock workers: everything of a worker but its engine and the bytes of its KV, which are simulated."""
