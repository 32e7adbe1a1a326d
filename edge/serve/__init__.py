"""Models behind HTTP: the APIs of OpenAI, Anthropic and Ollama, over engines in processes of their own."""
