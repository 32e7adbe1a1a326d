"""The HTTP server: the APIs of OpenAI, Anthropic, llama.cpp and Ollama, with engines in separate processes."""
