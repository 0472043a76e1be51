"""The front door: OpenAI HTTP in, two legs to vLLM out, around the brain."""
