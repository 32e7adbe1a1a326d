"""Ollama's API: chats, texts, embeddings and model lists."""
