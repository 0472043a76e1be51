"""Ways to carry pages to a peer store: one interface, one conformance suite, the fastest that proved itself first."""
