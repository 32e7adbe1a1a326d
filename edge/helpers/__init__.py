"""Workers that compute something for this device beside the model's ranks: drafts, and embeddings of pictures."""
