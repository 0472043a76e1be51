"""Breaks a running cluster on purpose while clients ask it, and says what they saw."""
