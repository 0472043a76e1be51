"""Public traces, replayed through the router's own decisions in front of simulated engines."""
