"""The node's page store: one process owns the arenas that workers map; the forward pass only copies memory."""
