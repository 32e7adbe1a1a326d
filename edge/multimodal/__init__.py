"""Pictures and sounds of a prompt: checked, decoded and encoded apart, and how a history of tokens holds them."""
