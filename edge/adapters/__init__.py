"""LoRA adapters: named, checked, and switched between passes."""
