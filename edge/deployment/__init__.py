"""Running models on devices: plans brought to life, watched, and replaced where devices are lost, leave or return."""
