"""Pure decisions: the only place where a trade-off lives. No state, no clock, no I/O."""
