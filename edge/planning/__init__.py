"""Plans of a model: found, compared, measured, and brought to life on devices."""
