"""kvrelay: split prefill from decode across vLLM workers; move, find, reuse and recover the KV cache between them."""

__version__ = "0.1.0"
