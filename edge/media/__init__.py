"""Pictures and sounds in prompts."""
