"""Ollama's API: chats, texts, embeddings, and the models that there are."""
