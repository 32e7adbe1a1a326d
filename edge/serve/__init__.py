"""Models behind HTTP: the APIs of OpenAI and Anthropic, over engines in processes of their own."""
