"""The vLLM KV connector: the scheduler half decides, the worker half moves."""
