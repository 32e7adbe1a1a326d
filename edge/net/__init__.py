"""How devices reach each other: channels, credentials, and the links between ranks."""
