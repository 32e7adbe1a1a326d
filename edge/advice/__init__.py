"""Which published models run well on the devices there are, predicted before any of them is downloaded."""
